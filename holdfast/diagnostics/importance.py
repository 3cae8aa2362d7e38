"""How training changes the order of parameters by importance, and what poisoned training changes besides
(FedCPA, Han et al., ICCV 2023, section 4; Fig. 1 and 4).

In each round the parameters are put in order by the importance that the last change of the global model gives
them. Every client of the cohort is then trained twice from that same model, on the same batches: once as a
benign client, once as an attacker. How far each parameter moves in the order is its rank change;
the disparity is the poisoned training's change minus the honest one's. FedCPA rests on the disparity being
large at both ends of the order."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from holdfast.aggregators.critical import importance, spans_of
from holdfast.attacks.adversary import Adversary
from holdfast.attacks.base import Attack
from holdfast.core.errors import ConfigError
from holdfast.core.files import write_atomically
from holdfast.core.progress import progress
from holdfast.core.types import ROOT, Exchange, Uplink
from holdfast.engine.run_context import RunContext
from holdfast.engine.simulator import Call, Simulator
from holdfast.experiment.config import Config, make_config
from holdfast.experiment.loop import Experiment
from holdfast.experiment.runner import RunCallbacks
from holdfast.report.charts import Series, curves
from holdfast.report.markup import fill
from holdfast.results.run import Run
from holdfast.sweeps.session import start


def rank_changes(
    source: Run | Config | Mapping[str, Any], rounds: int | None = None, places: int = 50, min_dims: int = 2
) -> pd.DataFrame:
    """Run an experiment again in a temporary folder and compare both trainings in every round from the second
    on.

    One row for each round, client and place in the order: `place` goes from 0 (least important) to 1,
    `benign` and `poisoned` are mean rank changes there as shares of the number of parameters, `disparity` is
    their difference. Without an attack there is only `benign`."""
    config = _config_of(source, rounds)
    found = _Comparison(places, min_dims)

    def engine(plans: Any, device: torch.device) -> _Both:
        return _Both(Simulator(plans, device), found)

    with tempfile.TemporaryDirectory() as folder, progress("rounds compared", config.train.rounds) as advance:
        done = 0

        def moved(experiment: Experiment) -> None:
            nonlocal done
            advance(experiment.run_context.round - done)
            done = experiment.run_context.round

        start([("", config)], Path(folder) / "run", RunCallbacks(moved=moved), engine=engine)
    if not found.frames:
        raise ConfigError(
            "train.rounds: importance ranks change from the second round on, if the model moves in the first;"
            " set 3 or more"
        )
    return pd.concat(found.frames, ignore_index=True)


def by_place(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation over clients and rounds, one row for each place: what the paper's figures
    show."""
    figures = [name for name in ("benign", "poisoned", "disparity") if name in frame]
    out = frame.groupby("place")[figures].agg(["mean", "std"])
    out.columns = [name if what == "mean" else f"{name}/std" for name, what in out.columns]
    return out.fillna(0.0).reset_index()


def write_page(frame: pd.DataFrame, path: str | Path, title: str = "Importance-rank changes") -> Path:
    """The figures as one HTML page: changes of both trainings, and their disparity, along the order; bands
    are one standard deviation."""
    means = by_place(frame)
    groups = {
        "Rank change": [n for n in ("benign", "poisoned") if n in means],
        "Disparity": [n for n in ("disparity",) if n in means],
    }
    across = "place in the order by importance, in per cent"
    charts = [
        (name, curves([series_of(means, figure) for figure in figures], name, True, across))
        for name, figures in groups.items()
        if figures
    ]
    page = fill("rank_changes.html", title=title, charts=charts)
    write_atomically(Path(path), page.encode(errors="replace"))
    return Path(path)


def series_of(means: pd.DataFrame, figure: str) -> Series:
    rows = zip(means["place"], means[figure], means[f"{figure}/std"], strict=True)
    return Series(figure, [(round(100 * place), mean, mean - std, mean + std) for place, mean, std in rows])


def changes(last: Tensor, own: Tensor, places: int) -> Tensor:
    """[n, places]: how far parameters moved between the order by `last` [d] and each client's own [n, d], as
    shares of d, averaged over neighbours in the order by `last`, which ascends. Equally important parameters
    are ordered by their index."""
    d = len(last)
    order = last.argsort(stable=True)
    rank = torch.empty_like(own, dtype=torch.int64).scatter_(
        1, own.argsort(dim=1, stable=True), torch.arange(d).expand(len(own), -1)
    )
    moved = (rank[:, order] - torch.arange(d)).abs().double() / d
    return torch.stack([part.mean(dim=1) for part in moved.tensor_split(min(places, d), dim=1)], dim=1)


@dataclass
class _Comparison:
    """What is kept between rounds: the model sent last, the two ways to train, and what was found."""

    places: int
    min_dims: int
    frames: list[pd.DataFrame] = field(default_factory=list)
    before: Tensor | None = None
    ways: dict[str, tuple[Adversary, Any]] = field(default_factory=dict)

    def look(self, engine: Simulator, call: Call) -> None:
        exchange = call.exchange.only(call.exchange.to != ROOT)
        if not len(exchange.to):
            return
        run_context, wire = call.run_context, call.run_context.wire()
        model = _one_model(run_context, exchange)[: wire.parameters]
        spans = spans_of(wire.layout(run_context.network.layout), self.min_dims)
        change = None if self.before is None or self.before.shape != model.shape else model - self.before
        self.before = model.clone()
        if change is None or not any(bool(change[span].any()) for span in spans):
            return
        last = torch.cat([(change[span] * model[span]).abs() for span in spans])
        self.ways = self.ways or _ways(run_context)
        frame = None
        for name, (adversary, federation) in self.ways.items():
            other = replace(run_context, adversary=adversary, federation=federation)
            up = engine.exchange([Call(other, replace(exchange, discard_state=True))])[0]
            own = torch.stack([importance(row, model, None, spans) for row in up["update"]])
            part = self._frame(run_context.round, up.ids, changes(last, own, self.places), name)
            frame = part if frame is None else frame.merge(part, on=["round", "client", "place"])
        assert frame is not None
        if "poisoned" in frame:
            frame["disparity"] = frame["poisoned"] - frame["benign"]
        self.frames.append(frame)

    def _frame(self, round: int, ids: Tensor, values: Tensor, name: str) -> pd.DataFrame:
        n, places = values.shape
        client, place = ids.repeat_interleave(places), ((torch.arange(places) + 0.5) / places).repeat(n)
        return pd.DataFrame(
            {"round": round, "client": client.numpy(), "place": place.numpy(), name: values.flatten().numpy()}
        )


@dataclass
class _Both:
    """An engine that runs an experiment unchanged and lets a comparison train the clients again before every
    training; the state of those trainings is discarded."""

    inner: Simulator
    comparison: _Comparison

    def exchange(self, calls: Sequence[Call]) -> list[Uplink]:
        for call in calls:
            if call.exchange.task == "train" and not call.exchange.discard_state:
                self.comparison.look(self.inner, call)
        return self.inner.exchange(calls)

    def close(self) -> None:
        self.inner.close()


def _ways(run_context: RunContext) -> dict[str, tuple[Adversary, Any]]:
    """No client attacks; and, where the run has an attack, every client does: an attacker's data is drawn by
    its own key, so each one's is what it would be among few."""
    real = run_context.adversary
    honest = real.honest if real.honest is not None else run_context.federation
    ways: dict[str, Attack | None] = {"benign": None}
    if real.attack is not None:
        ways["poisoned"] = real.attack.model_copy(
            update={"clients": tuple(real.members.tolist()), "redraw": False}
        )
    out = {}
    for name, attack in ways.items():
        adversary = Adversary(attack, real.members, real.key)
        out[name] = adversary, adversary.poison_data(honest)
    return out


def _one_model(run_context: RunContext, exchange: Exchange) -> Tensor:
    if (
        not exchange.pick.shape[1]
        or bool((exchange.pick[:, 0] != exchange.pick[0, 0]).any())
        or int(exchange.pick[0, 0]) < 0
    ):
        raise ConfigError(
            f"method: '{run_context.method.name}' does not send one model to all clients, so there is no"
            " common order; choose fedavg"
        )
    return exchange.bank[int(exchange.pick[0, 0])]


def _config_of(source: Run | Config | Mapping[str, Any], rounds: int | None) -> Config:
    config = (
        source.config
        if isinstance(source, Run)
        else source
        if isinstance(source, Config)
        else make_config(source)
    )
    return (
        config
        if rounds is None
        else config.model_copy(update={"train": config.train.model_copy(update={"rounds": rounds})})
    )
