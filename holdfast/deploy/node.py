"""One real client: its world, rebuilt from the config, and its private state on its own disk. This file does
not use Flower.

    STATE-DIR/RUN/CLIENT/000012-00.safetensors     private rows after step 0 of round 12
    STATE-DIR/RUN/CLIENT/data                      names the samples that this client brought, if it did
    STATE-DIR/RUN/CLIENT/attempt                   the starts of the server that have asked; they belong to
                                                   the last
    STATE-DIR/RUN/CLIENT/model.safetensors         the model that this client uses, as of its last evaluation

A server that was stopped repeats its unfinished round, so a client keeps its states since the committed round
and starts from the newest one before the step it is asked for. When another start of the server asks, states
after the committed round are discarded."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from holdfast.core.errors import ConfigError, RunError
from holdfast.core.files import remove_left_over
from holdfast.core.reading import read_whole
from holdfast.core.types import Exchange, State
from holdfast.data.federation import Federation
from holdfast.data.node_data import holding
from holdfast.data.samples import Samples
from holdfast.data.sources.declared import Declared
from holdfast.deploy.privacy import Guard
from holdfast.engine.client_stack import PASSES, ClientStack
from holdfast.engine.client_task import EVALUATE, schema_of, sends_global_first
from holdfast.engine.run_context import Call
from holdfast.experiment.config import Config, make_config
from holdfast.experiment.config_tables import read_config
from holdfast.experiment.loop import Experiment
from holdfast.experiment.manifest import digest_of, plugins_of
from holdfast.local.plan import Plan
from holdfast.storage.store import read_tensors, write_atomically, write_tensors

Version = tuple[int, int]
"""Round and step."""
_FORM = " 2"
"""Of requests and replies. A node of a Holdfast with another form says so, instead of sending what would be a
strike."""
_MARK = 1 << 22  # bytes that are read of a mark: a hundred thousand starts of a server


def federated(path: Path | str) -> Config:
    """Read the config as a federation runs it: every client alone on its own machine, which is plan
    `loop`."""
    config = make_config(read_config(path, ["engine.plan=loop", "engine.workers=1"]))
    config.parts()
    if config.attack is not None:
        raise ConfigError("attack: only the simulator has attackers; leave it out of a federation's config")
    declared = declared_in(config)
    if declared is not None:
        declared.check()
        if config.evaluate.test == "global":
            raise ConfigError(
                'evaluate.test = "global": declared data has no common test split; leave it out'
            )
    expected(config)
    return config


def declared_in(config: Config) -> Declared | None:
    """Return the schema of the nodes' own data; None where every node takes its share of one dataset."""
    source = config.data.source()
    return source if isinstance(source, Declared) else None


def expected(config: Config) -> int:
    """Return how many clients a federation waits for; it must be known before data is read."""
    clients = config.data.known_clients
    if clients is None:
        raise ConfigError(
            "data.clients: a federation has to know how many clients to wait for; set it to their number"
        )
    return clients


def fingerprint(config: Config, partition: str, initial: Tensor) -> str:
    """Return a digest of what server and clients must agree on: the experiment, the plug-ins it names, how
    its data is divided and, where it starts from a file, the contents of the file; not where data and file
    are or how it is computed."""
    table = config.plain()
    for plugin in sorted(
        hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for file in plugins_of(config.parts(), config.data)
    ):
        partition += f" {plugin}"
    if isinstance(table["model"], dict) and table["model"].pop("weights", None) is not None:
        partition += f" {digest_of(initial)}"
    table["data"].pop("dir")
    table.pop("engine")
    return hashlib.sha256(f"{json.dumps(table, sort_keys=True)} {partition}{_FORM}".encode()).hexdigest()


Bring = Callable[[Declared], Samples]
"""Loads a node's own data, checked against the declaration."""


class Node:
    """A client of a run. It recomputes the division of the data from the seed and reads only its own rows; or
    it has its own data. A guard checks everything that leaves."""

    def __init__(
        self,
        config: Config,
        client: int,
        folder: Path,
        world: str,
        threads: int,
        bring: Bring | None = None,
        guard: Guard | None = None,
        device: torch.device | None = None,
    ):
        torch.set_num_threads(threads)  # bits may depend on it, so all sides use the server's number
        self.experiment = Experiment(config, folder)
        if not 0 <= client < self.experiment.federation.clients:
            raise ConfigError(
                f"client-id: there are clients 0 to {self.experiment.federation.clients - 1}, got {client}"
            )
        if fingerprint(config, self.experiment.federation.digest, self.experiment.initial) != world:
            raise ConfigError(
                f"client {client}: this node's config, plug-ins or data differ from the server's; use"
                " the same on both"
            )
        self.client, self.folder, self.run_context, self.guard = (
            client,
            folder,
            self.experiment.run_context,
            guard,
        )
        self.run_context.secret_noise = True  # the server knows the run's key
        self.device = device or torch.device("cpu")
        self.run_context.federation = own_data(self.experiment, client, bring)
        if bring is not None:
            self._note_data(self.run_context.federation.samples.digest)

    def _note_data(self, digest: str) -> None:
        """Warn if the data changed: more rows are fine, but rows may have moved from testing to training."""
        mark = self.folder / "data"
        before = _read_mark(mark) or digest
        if before != digest:
            print(
                "this client's data has changed since the run began: rows may have moved from testing to"
                " training",
                file=sys.stderr,
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(mark, digest.encode())

    def enter(self, round: int) -> None:
        """Set the round of the next requests."""
        self.run_context.round = round

    def perform(self, exchange: Exchange, committed: int, attempt: str) -> Mapping[str, Tensor]:
        """Perform the request with the simulator's own code, for a stack of one, and keep the new state.
        `attempt` names this start of the server."""
        schema = schema_of(self.run_context.rule, exchange, self.run_context.wire(), self.run_context.measure)
        if self.guard is not None:
            self.guard.check(schema, exchange.task)
        version = self.run_context.round, exchange.step
        before = self._before(version, committed, attempt)
        stored = {} if before is None else read_tensors(self._file(before))
        clients = ClientStack({self.run_context.plan_key: Plan("loop")}, self.device)
        state, fields = clients.perform(
            [Call(self.run_context, exchange)], torch.tensor([before is not None]), stored
        )
        self._attempts(attempt)  # another may have begun meanwhile
        fields = {name: value.cpu() for name, value in fields.items()}
        if state:
            write_tensors(self._file(version), {name: value.cpu() for name, value in state.items()})
        if exchange.task == EVALUATE and not exchange.discard_state:
            self._keep_model(clients, exchange, before is not None, stored)
        trained = fields.pop(PASSES, None)
        if self.guard is None:
            return fields
        return self.guard.protect(
            fields, schema, exchange.task, 1 if trained is None else max(1, int(trained[0, 0]))
        )

    def _keep_model(self, clients: ClientStack, exchange: Exchange, known: bool, stored: State) -> None:
        """Save the model that this client uses from now on; the personal model exists nowhere else."""
        run_context = self.run_context
        if sends_global_first(run_context.rule):
            exchange = replace(exchange, pick=exchange.pick[:, 1:])
        deployed = clients.models(
            Call(run_context, exchange), run_context.method.deploys, torch.tensor([known]), stored
        )
        module = run_context.rule.unwrapped(run_context.network.load(deployed[0].cpu()))
        write_tensors(
            self.folder / "model.safetensors",
            {name: value.contiguous() for name, value in module.state_dict().items()},
        )

    def _before(self, version: Version, committed: int, attempt: str) -> Version | None:
        """Return the newest state before this version, if any; remove states that are no longer needed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_left_over(self.folder)
        seen = self._attempts(attempt)
        if seen[-1:] != [attempt]:
            for abandoned in [v for v in self._versions() if v[0] > committed]:
                self._file(abandoned).unlink()
            write_atomically(self.folder / "attempt", " ".join([*seen, attempt]).encode())
        for outdated in [v for v in self._versions() if v[0] <= committed][:-1]:
            self._file(outdated).unlink()
        older = [v for v in self._versions() if v < version]
        return older[-1] if older else None

    def _attempts(self, attempt: str) -> list[str]:
        """Return the starts of the server that have asked, in order. A late request of an earlier start is
        refused: it must not undo newer work."""
        mark = self.folder / "attempt"
        seen = _read_mark(mark).split()
        if attempt in seen[:-1]:
            raise RunError("this request is from an earlier start of the server; nothing was done")
        return seen

    def _versions(self) -> list[Version]:
        names = (
            re.fullmatch(r"(\d{6,10})-(\d{2,9})", file.stem)
            for file in self.folder.glob("[0-9]*-*.safetensors")
        )
        return sorted((int(name[1]), int(name[2])) for name in names if name)

    def _file(self, version: Version) -> Path:
        return self.folder / f"{version[0]:06d}-{version[1]:02d}.safetensors"


def _read_mark(file: Path) -> str:
    """Return the contents of a mark of this node; an empty string if there is none."""
    try:
        return read_whole(file, _MARK).decode(errors="replace")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read: {error}") from None


def own_data(experiment: Experiment, client: int, bring: Bring | None) -> Federation:
    """Return the division of the data as this node knows it."""
    config, federation = experiment.config, experiment.run_context.federation
    declared = declared_in(config)
    if declared is None:
        if bring is not None:
            raise ConfigError(
                'node.toml: data and function are for experiments with data.name = "declared"; leave them out'
            )
        return federation
    if bring is None:
        raise ConfigError(
            'node.toml: the experiment only declares its data; set data = "FOLDER" or function ='
            ' "FILE.py:NAME"'
        )
    return holding(
        federation, bring(declared), client, config.data.split, declared, experiment.key.fold("data")
    )
