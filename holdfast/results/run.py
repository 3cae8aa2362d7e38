"""Reads runs from disk: metrics as data frames, models as modules."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from holdfast.core.errors import ConfigError, NoSuchResult, RunError, in_print, suggest
from holdfast.core.generators import run_to_end
from holdfast.core.registry import parts
from holdfast.core.screening import screen
from holdfast.core.together import computed_alone
from holdfast.core.types import Exchange, Schema, State, Uplink
from holdfast.data.handed.content import HandedOver
from holdfast.engine.client_stack import ClientStack
from holdfast.engine.run_context import Call, RunContext
from holdfast.engine.simulator import Simulator
from holdfast.evaluation.scores import METRICS
from holdfast.experiment.config import Config
from holdfast.experiment.given_again import how_to_resume, without_model_objects
from holdfast.experiment.loop import Experiment
from holdfast.experiment.manifest import config_again, config_of, read_manifest, run_folders
from holdfast.experiment.records import server_state
from holdfast.experiment.round_evaluation import discarding_state
from holdfast.local.plan import Plan
from holdfast.methods.base import Method
from holdfast.results.late_join import parameters_of
from holdfast.results.tables import DeclaredTables, table_of, tables_of
from holdfast.storage.client_state import RowStore
from holdfast.storage.damage import using_committed
from holdfast.storage.store import Store


class Run:
    """One run on disk, finished or not. Reading needs no lock: committed files do not change."""

    def __init__(
        self,
        path: str | Path,
        config: Config | None = None,
        data: Sequence[HandedOver] = (),
        again: Mapping[str, Any] | None = None,
    ):
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        self.store = Store(self.path)
        self._config, self._data, self._again = config, data, again or {}

    def __repr__(self) -> str:
        return (
            f"Run({self.path}, {self.manifest['label'] or name_of(self.manifest['config']['method'])}, round"
            f" {self.round})"
        )

    @property
    def config(self) -> Config:
        if self._config is None:
            self._config = config_again(self.path, self.manifest, self._data, self._again)
        return self._config

    @cached_property
    def data_config(self) -> Config:
        """The config of the data and the seed alone: who holds what depends on no other part."""
        chosen = {name: self.manifest["config"][name] for name in ("data", "seed")}
        return self._config or config_of(self.path, {**self.manifest, "config": chosen}, data=self._data)

    @cached_property
    def parts_config(self) -> Config:
        """The config for what needs no model and no loss, which may have been Python objects."""
        if self._config is not None or self._again:
            return self.config
        table = without_model_objects(self.manifest["config"])
        return config_of(self.path, {**self.manifest, "config": table}, data=self._data)

    @property
    def round(self) -> int:
        """The last committed round."""
        return self.store.round() or 0

    @property
    def final(self) -> dict[str, Any]:
        result = self.store.result()
        if result is None:
            raise RunError(
                f"{self.path} has not finished; {how_to_resume(self.path, self.manifest)} continues it"
            )
        return result["final"]

    @property
    def metrics(self) -> pd.DataFrame:
        """One row per committed round; docs/python.md says what the columns mean.

        >>> run.metrics[["round", "accuracy", "loss"]]"""
        rows = [
            {"round": part["round"], **part["metrics"], **_seconds(part)}
            for part in self.store.parts(self.round)
        ]
        return pd.DataFrame(rows)

    @cached_property
    def client_names(self) -> tuple[str, ...]:
        """The names of the clients, where they were given or the data has them; otherwise empty."""
        given = self.manifest["config"]["data"].get("names") or self.manifest.get("client_names", [])
        return tuple(map(in_print, given))

    def client_name(self, client: int) -> str:
        """How tables and pages call a client: its name, or else its number."""
        return self.client_names[client] if 0 <= client < len(self.client_names) else str(client)

    def client_number(self, client: int | str) -> int:
        """The number of a client that is given by number or by name."""
        if not isinstance(client, str):
            return client
        if client not in self.client_names:
            known = suggest(client, self.client_names) if self.client_names else "; its clients have no names"
            raise ConfigError(f"{self.path}: there is no client '{client}'{known}")
        return self.client_names.index(client)

    def clients(self, round: int | None = None, late: bool = False) -> pd.DataFrame:
        """One row for each evaluated client of a round: accuracy and the configured metrics of each of its
        models (NaN if it has none), samples, whether it was in the cohort. With `late`, the clients that
        `data.held_out` keeps out of training.

        >>> run.clients()                        # after the last round
        >>> run.clients(round=1)"""
        round = self.round if round is None else round
        arrays, of = self.store.arrays(round), "late" if late else "evaluate"
        if "evaluate/ids" not in arrays:
            raise ConfigError(f"{self.path}: round {round} was not evaluated")
        if f"{of}/ids" not in arrays:
            raise ConfigError(f"{self.path}: no client was held out; set data.held_out")
        with using_committed(self.path, round):
            frame = _clients_of(arrays, of)
        if self.client_names:
            frame.insert(1, "name", [self.client_name(client) for client in frame["client"]])
        return frame

    @property
    def tables(self) -> dict[str, str]:
        """The tables that were recorded about the clients in every round: names for `table`, with a
        description."""
        return tables_of(self.store, self.round, self.declared_tables)

    @cached_property
    def declared_tables(self) -> DeclaredTables:
        """What parts declare of the tables that they record."""
        return DeclaredTables(name_of(self.manifest["config"]["method"]))

    def table(self, name: str) -> pd.DataFrame:
        """One of `tables` over all rounds: round, client, whether it is malicious, value; of a matrix also
        `other`, the column's client. Where clients have names, `name` and `other_name` follow them."""
        with using_committed(self.path, self.round):
            frame = table_of(
                self.store,
                self.round,
                name,
                self.manifest["malicious"],
                str(self.path),
                self.declared_tables,
            )
        declared = self.declared_tables.find(name)
        titles = {"client": "name"} | ({"other": "other_name"} if declared and declared.columns else {})
        for number, title in titles.items() if self.client_names else ():
            if number in frame:
                named = [self.client_name(int(client)) for client in frame[number]]
                frame.insert(list(frame.columns).index(number) + 1, title, named)
        return frame

    def malicious_names(self, round: int | None = None) -> list[str]:
        """The attackers by their names, or by their numbers as text where clients have none; otherwise as
        `malicious`.

        >>> run.malicious_names()
        ['Bonn', 'Cork']"""
        return [self.client_name(client) for client in self.malicious(round)]

    def malicious(self, round: int | None = None) -> list[int]:
        """The numbers of the attackers; if they are redrawn every round, those of a round, by default the
        last. `malicious_names` has their names."""
        clients = self.manifest["malicious"]
        if isinstance(clients, list):
            return clients
        round = self.round if round is None else round
        drawn = self.store.arrays(round).get("malicious")
        if drawn is None:
            raise ConfigError(
                f"{self.path}: the attackers are drawn for every round, and there is no round {round}"
            )
        return drawn.tolist()

    @cached_property
    def _experiment(self) -> Experiment:
        experiment = Experiment(self.config, self.path, self.manifest["label"])
        there, saved = experiment.network.layout.parameters, self.manifest.get("parameters")
        if self._again and there != (saved or there):
            raise ConfigError(
                f"{self.path}: the model given has {there:,} parameters, the saved one {saved:,}"
            )
        return experiment

    def _head(self) -> tuple[int, State]:
        head = self.store.head()
        if head is None:
            raise RunError(f"{self.path} has no committed round yet")
        return head

    def state(self) -> State:
        """The server's committed state."""
        return server_state(self._head()[1])

    def vector(self, client: int | str | None = None, model: str | None = None) -> Tensor:
        """A model as one vector: of a client, by its number or name (by default the model the method
        deploys) or, without a client, the global one."""
        client = None if client is None else self.client_number(client)
        method, clients = self._experiment.method, self._experiment.federation.clients
        kind = model or ("global" if client is None else method.deploys)
        if kind not in method.models:
            raise ConfigError(f"{method.name} has no {kind} model; it has {', '.join(method.models)}")
        if kind != "global" and client is None or client is not None and not 0 <= client < clients:
            raise ConfigError(f"client {client}: the run has clients 0 to {clients - 1}")
        while True:
            round, saved = self._head()
            with using_committed(self.path, round):
                vector = self._vector(round, saved, client, kind)
            if self.round == round:  # otherwise a commit came between, and a row may be newer than the state
                return vector

    def _vector(self, round: int, saved: State, client: int | None, kind: str) -> Tensor:
        experiment, state = self._experiment, self._restored(round, saved)
        if kind != "global":
            assert client is not None
            return self._of_client(round, state, client, kind, experiment.run_context)
        shared = experiment.server.global_model(state)
        assert shared is not None
        return experiment.run_context.wire().unpack(shared, experiment.initial)

    def _restored(self, round: int, saved: State) -> State:
        """Put the experiment into its state after a round, and return the server's state."""
        run_context = self._experiment.run_context
        run_context.round = max(round, 1)
        run_context.rows = RowStore(self.path / "rows", saved["rows/index"])
        self._experiment.participation.restore(saved)
        return server_state(saved)

    def _of_client(self, round: int, state: State, client: int, kind: str, run_context: RunContext) -> Tensor:
        """Return a model of a client, as in the evaluation: what the server half would send now, after what
        the client half makes of it."""
        experiment, ids = self._experiment, torch.tensor([client])
        plans = {run_context.plan_key: Plan(**self.manifest["plan"])}
        simulator = Simulator(plans)
        sent = self._delivered(
            round, state, ids, lambda asked: simulator.exchange([Call(run_context, asked)])[0]
        )
        selected = torch.isin(ids, self.store.arrays(round).get("took_part", ids[:0]))
        exchange = Exchange(
            "deliver", ids, sent.bank, sent.pick, {"selected": selected}, experiment.meter.next_step()
        )
        known = run_context.rows.present(ids)
        stored = run_context.rows.read(ids[known]) if bool(known.any()) else {}
        return ClientStack(plans).models(Call(run_context, exchange), kind, known, stored)[0]

    def _delivered(
        self, round: int, state: State, ids: Tensor, answer: Callable[[Exchange], Uplink]
    ) -> Exchange:
        """Return what the server half would send these clients now; `answer` replies to its earlier
        requests."""
        experiment, ctx = self._experiment, self._experiment.context()
        ctx = replace(
            ctx, cohort=self.store.arrays(round).get("cohort", ctx.cohort)
        )  # drawn before this round's bans
        experiment.meter.steps = (self.store.part(round) or {}).get("exchanges", 0)
        steps = discarding_state(experiment.server.deliver(state, ctx, ids), experiment.meter)
        return run_to_end(computed_alone(steps), answer)

    def model(self, client: int | str | None = None, model: str | None = None) -> nn.Module:
        """A trained model as an ordinary module, ready to use: of a client, by its name or number, the model
        that the method deploys there; without a client the global one.

        >>> run.model()                          # the global model, where the method has one
        >>> run.model(client="York")             # what this client uses
        >>> run.model(client=7, model="personal")"""
        experiment = self._experiment
        return experiment.rule.unwrapped(experiment.network.load(self.vector(client, model))).eval()

    # ---- results that only some methods have, as the method declares them (methods.base.FinishedRun)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not any(name in method.results for method in _methods()):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        own = self.parts_config.parts().method
        if name not in own.results:
            have = " and ".join(method.name for method in _methods() if name in method.results)
            what = next(m.results[name].__doc__ or "" for m in _methods() if name in m.results).partition(
                "."
            )[0]
            raise NoSuchResult(f"{self.path}: {own.name} has no result '{name}' ({what}); {have} has it")
        return partial(own.results[name], self)

    def server_state(self) -> State:
        """The server's state, and the experiment as it was after the last committed round."""
        round, saved = self._head()
        with using_committed(self.path, round):
            return self._restored(round, saved)

    def module(self, model: Tensor) -> nn.Module:
        """A model as it travels, as a module."""
        experiment = self._experiment
        return experiment.network.load(experiment.run_context.wire().unpack(model, experiment.initial))

    def parameters_of(self, change: Tensor | Mapping[str, Tensor], where: str) -> Tensor:
        """A change of a model as one vector of its parameters."""
        network = self._experiment.network
        return parameters_of(change, network.layout, where).to(network.dtype)

    def new_client_id(self) -> int:
        """The number that a client would get that joins now: the one after the last."""
        return self._experiment.federation.clients

    def delivered(self, client: int, reply: Callable[[Schema], Mapping[str, Tensor]], where: str) -> Exchange:
        """What the server would send this client now; `reply` makes its answer to what it is asked first."""
        (round, saved), ids, run_context = self._head(), torch.tensor([client]), self._experiment.run_context

        def answer(asked: Exchange) -> Uplink:
            schema = run_context.rule.schema(asked.task, run_context.wire())
            up = screen(Uplink(ids, reply(schema)), schema)
            if not len(up):
                raise ConfigError(f"{where}: {next(iter(up.refused.values()))}")
            return up

        with using_committed(self.path, round):
            return self._delivered(round, self._restored(round, saved), ids, answer)


def _methods() -> list[type[Method]]:
    return [cls for cls in parts("method").values() if issubclass(cls, Method)]


def _clients_of(arrays: State, of: str) -> pd.DataFrame:
    """One row for each evaluated client of a round's arrays."""
    frame = pd.DataFrame(
        {"client": arrays[f"{of}/ids"].tolist(), "selected": arrays[f"{of}/selected"].tolist()}
    )
    total = arrays[f"{of}/test/total"]
    frame["samples"] = total.long().tolist()
    for name, value in sorted(arrays.items()):  # files give their arrays in any order
        model, _, figure = name.removeprefix(f"{of}/test/").partition("/")
        if not name.startswith(f"{of}/test/"):
            continue
        if figure == "correct":
            frame[f"accuracy/{model}"] = (value / total.clamp(min=1)).tolist()
        elif figure in METRICS:
            frame[f"{figure}/{model}"] = value.where(value >= 0, torch.nan).tolist()
    return frame


def load(pattern: str | Path) -> pd.DataFrame:
    """Return the metrics of all runs that match as one data frame: a row per run and round, with the main
    settings of each run.

    >>> frame = holdfast.load("runs/*")
    >>> frame[["run", "method", "seed", "round", "accuracy"]]

    `holdfast.open` gives a run or a sweep as an object instead."""
    folders = [folder for path in sorted(glob.glob(str(pattern))) for folder in run_folders(Path(path))]
    if not folders:
        raise ConfigError(f"no runs match {pattern}")
    frames = []
    for folder in folders:
        run = Run(folder)
        frame = run.metrics
        config = run.manifest["config"]
        about = {
            "run": str(folder),
            "label": run.manifest["label"],
            "method": name_of(config["method"]),
            "seed": config["seed"],
        }
        about |= {
            "data": config["data"]["name"],
            "attack": name_of(config["attack"]),
            "aggregator": name_of(config["aggregator"]),
            "server": name_of(config.get("server")),
        }
        for place, (column, value) in enumerate(about.items()):
            frame.insert(place, column, value)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def name_of(section: Any) -> str | None:
    """Return the name of a part in a manifest's config, with its wrappers; None if there is no part."""
    if not isinstance(section, dict):
        return section
    name = section.get("name")
    for wrapper in section.get("wrap", ()):
        name = f"{name_of(wrapper)}({name})"
    return name


def _seconds(part: dict[str, Any]) -> dict[str, float]:
    return {f"seconds/{name}": value for name, value in part.get("seconds", {}).items()}
