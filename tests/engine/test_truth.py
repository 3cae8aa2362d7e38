"""A defence never sees who is malicious: nothing it is handed leads there, and asking ends the run."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.attacks import Adversary, Attack
from holdfast.core.errors import RunError
from holdfast.core.types import Exchange, State, Uplink, Verdict
from holdfast.detectors.base import Detector, Judgement
from holdfast.experiment.loop import Experiment
from holdfast.methods.averaging import Averaging
from holdfast.methods.base import Method
from holdfast.methods.context import Context
from holdfast.methods.fedavg import FedAvgClient
from holdfast.results.run import Run
from tests.helpers import run_all, tiny

MALICIOUS = (1, 3)


def reachable(*roots: Any) -> list[Any]:
    """Everything that attributes, containers, slots, closures and bound methods lead to. Modules, classes and
    a function's globals belong to the program, not to the run."""
    seen: dict[int, Any] = {}
    todo = list(roots)
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, (types.ModuleType, type)):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, types.FunctionType):
            todo += [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__]
        elif isinstance(thing, types.CellType):
            todo.append(thing.cell_contents if thing != types.CellType() else None)
        elif isinstance(thing, types.FrameType):
            continue
        else:
            todo += gc.get_referents(thing)
            todo += (
                list(vars(thing).values())
                if hasattr(type(thing), "__dict__") and hasattr(thing, "__dict__")
                else []
            )
    return list(seen.values())


def tells(things: list[Any], malicious: Tensor) -> list[Any]:
    """The adversary, its attack, or anything with the content of its list."""
    secret = set(malicious.tolist())
    out = [t for t in things if isinstance(t, (Adversary, Attack))]
    out += [
        t
        for t in things
        if isinstance(t, Tensor) and t.dtype == torch.int64 and t.ndim == 1 and torch.equal(t, malicious)
    ]
    out += [
        t
        for t in things
        if isinstance(t, (list, tuple, set, frozenset))
        and all(isinstance(i, int) for i in t)
        and set(t) == secret
    ]
    return out


HANDED: list[Any] = []


class Nosy(Averaging):
    def init(self, ctx: Context) -> State:
        HANDED.append(ctx)
        return super().init(ctx)

    def round(self, state: State, ctx: Context) -> Generator[Exchange, Uplink, tuple[State, Verdict]]:
        up = yield ctx.ask("train", state["model"])
        HANDED.extend([self, state, ctx, up])
        state, up, verdict = yield from ctx.judge(state, up, state["model"])
        merged = ctx.reduce(state, up, state["model"], verdict)
        return merged.state | {"model": merged.model}, merged.verdict

    def deliver(self, state: State, ctx: Context, ids: Tensor) -> Generator[Exchange, Uplink, Exchange]:
        HANDED.append(ctx)
        return (yield from super().deliver(state, ctx, ids))

    def finish(self, state: State, ctx: Context) -> Generator[Exchange, Uplink, State]:
        HANDED.append(ctx)
        return (yield from super().finish(state, ctx))


class NosyDetector(Detector):
    """Keeps what it is handed."""

    def judge(
        self, state: State, ctx: Context, models: Tensor, ids: Tensor
    ) -> Generator[Exchange, Uplink, Judgement]:
        yield from ()
        HANDED.extend([ctx, models, ids])
        return Judgement({})


class NosyMean(Aggregator):
    """Keeps what it is handed."""

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        HANDED.extend([x, w, ctx])
        return Reduced(w @ x, w, state)


class Watching(Method):
    """FedAvg with a server that looks around."""

    Client = FedAvgClient
    Server = Nosy


def test_nothing_in_a_context_leads_to_the_attackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HANDED.clear()
    made: list[Experiment] = []
    build = Experiment.__init__
    monkeypatch.setattr(
        Experiment, "__init__", lambda self, *a, **k: (made.append(self), build(self, *a, **k))[1]
    )
    run_all(
        [
            {
                "method": Watching(),
                "attack": Attack(clients=MALICIOUS),
                "aggregator": NosyMean(),
                "detectors": (NosyDetector(),),
            }
        ],
        tmp_path / "x",
    )
    experiment = made[0]
    malicious = experiment.adversary.malicious
    assert malicious.tolist() == [1, 3] and len(HANDED) > 10
    found = reachable(*HANDED)
    assert len(found) > 50 and any(isinstance(t, Aggregator) for t in found)  # the walk went somewhere
    assert tells(found, malicious) == []
    # the walk would have found it, behind any of the usual doors
    assert experiment.adversary in tells(reachable(experiment), malicious)
    assert tells(reachable(experiment.context), malicious)  # a bound method
    secret = experiment.adversary
    doors: list[Any] = [
        lambda: secret,
        functools.partial(print, secret),
        {"a": [secret]},
        secret.benign,
        (x for x in [secret]),
        types.SimpleNamespace(a=secret),
    ]
    for door in doors:
        assert tells(reachable(door), malicious), door
    assert tells(reachable([malicious.clone()]), malicious) and tells(reachable({"ids": [1, 3]}), malicious)


def ask(ctx: Any, how: str) -> None:
    if how == "attribute":
        _ = ctx.malicious
    elif how == "getattr":
        getattr(ctx, "benign", None)
    else:
        hasattr(ctx, "adversary")


@pytest.mark.parametrize("how", ["attribute", "getattr", "hasattr"])
@pytest.mark.parametrize("who", ["server", "detector", "aggregator"])
def test_a_defence_that_asks_ends_the_run(how: str, who: str, tmp_path: Path) -> None:
    class Cheat(Averaging):
        def round(self, state: State, ctx: Context) -> Generator[Exchange, Uplink, tuple[State, Verdict]]:
            if ctx.round == 2 and who == "server":
                ask(ctx, how)
            return (yield from super().round(state, ctx))

    class CheatDetector(Detector):
        """Asks."""

        def judge(
            self, state: State, ctx: Context, models: Tensor, ids: Tensor
        ) -> Generator[Exchange, Uplink, Judgement]:
            yield from ()
            if ctx.round == 2:
                ask(ctx, how)
            return Judgement({})

    class CheatMean(Aggregator):
        """Asks."""

        def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
            if ctx.round == 2:
                ask(ctx, how)
            return Reduced(w @ x, w, state)

    class Cheating(Method):
        """FedAvg that would like to know."""

        Client = FedAvgClient
        Server = Cheat

    table: dict[str, Any] = {"method": Cheating(), "attack": Attack(clients=MALICIOUS)}
    table |= (
        {"detectors": (CheatDetector(),)}
        if who == "detector"
        else {"aggregator": CheatMean()}
        if who == "aggregator"
        else {}
    )
    with pytest.raises(
        RunError, match="round 2: the server side asked for .* a defence never sees who is malicious"
    ):
        run_all([table], tmp_path / "x")
    assert Run(tmp_path / "x", tiny(**table)).round == 1  # the round before it stands


def test_the_context_cannot_be_written_to(simulate: Callable[..., Run]) -> None:
    context = simulate()._experiment.context()
    with pytest.raises(AttributeError):
        context.round = 7  # type: ignore[misc]
