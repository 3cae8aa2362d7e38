"""One experiment for both worlds, and what "the same bits" means."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.core.types import State
from holdfast.engine.simulator import Simulator
from holdfast.experiment.config import Config, make_config
from holdfast.experiment.config_tables import read_config
from holdfast.experiment.runner import MakeEngine, RunCallbacks
from holdfast.storage.client_state import RowStore
from holdfast.storage.store import Store, read_tensors
from holdfast.sweeps.session import start

CONFIG = """
seed = 3
{top}
[data]
clients = {clients}
partition = {{ name = "dirichlet", beta = 0.5 }}
{data}
[model]
{model}
[method]
name = "{method}"
[train]
rounds = {rounds}
local_epochs = 1
{momentum}
lr_decay = 0.9
{train}
[engine]
plan = "loop"
threads = 1
"""


def write_config(
    folder: Path, method: str, rounds: int = 2, file: str | None = None, clients: int = 3, **sections: str
) -> Path:
    """`sections` are lines of TOML: top, data, train; model and momentum replace the defaults. The file is
    called as the method unless told."""
    path = folder / f"{file or method}.toml"
    lines = {"top": "", "data": "", "train": "", "model": 'name = "mlp"\nhidden = 16'}
    lines |= {"momentum": "momentum = 0.5", **sections}
    path.write_text(CONFIG.format(method=method, rounds=rounds, clients=clients, **lines))
    return path


def simulate(
    config: Path,
    out: Path,
    engine: MakeEngine = Simulator,
    moved: Callable[[Any], None] = lambda experiment: None,
) -> Path:
    made: Config = make_config(read_config(config))
    start([("", made)], out, RunCallbacks(moved=moved), engine=engine)
    return out


def keep_states(run: Path, into: Path) -> None:
    """A commit removes the state of the round before: keep it."""
    _keep(run / "state", "*.safetensors", into)


def keep_node_states(home: Path, run: Path, into: Path) -> None:
    """So do nodes with theirs, which lie under the run's label: its folder's name and some random letters."""
    _keep(home, f"node*/{run.name}-*/*/[0-9]*.safetensors", into)


def _keep(folder: Path, pattern: str, into: Path) -> None:
    for file in folder.glob(pattern):
        kept = into / file.relative_to(folder)
        kept.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, kept)
        except (FileExistsError, FileNotFoundError):  # seen before, or just replaced
            pass


def private_rows(run: Path) -> dict[int, State]:
    """The simulator's private rows, by client."""
    head = Store(run).head()
    assert head is not None
    rows = RowStore(run / "rows", head[1]["rows/index"])
    return {client: rows.read(torch.tensor([client])) for client in rows.place}


def node_states(home: Path, round: int) -> dict[int, State]:
    """What the clients have on their own disks after a round: the newest of each, for not all are asked in
    every round."""
    files = sorted(home.glob("node*/*/*/[0-9]*-*.safetensors"))  # by node, run, client, round and step
    return {
        int(file.parent.name): read_tensors(file)
        for file in files
        if int(file.stem.partition("-")[0]) <= round
    }


def same_bits(a: State, b: State) -> bool:
    def one(x: Tensor, y: Tensor) -> bool:
        return x.dtype == y.dtype and x.shape == y.shape and x.numpy().tobytes() == y.numpy().tobytes()

    return a.keys() == b.keys() and all(one(a[name], b[name]) for name in a)


def assert_same_runs(a: Path, b: Path, rounds: int) -> None:
    """Every committed figure (except seconds), every client's figures, every verdict, and the server's
    state."""
    for round in range(1, rounds + 1):
        parts = [Store(run).parts(rounds)[round - 1] for run in (a, b)]
        for part in parts:
            part.pop("seconds")
        assert parts[0]["metrics"]["accuracy"] is not None
        assert parts[0] == parts[1]
        assert same_bits(Store(a).arrays(round), Store(b).arrays(round)), f"arrays of round {round}"
    heads = [Store(run).head() for run in (a, b)]
    assert heads[0] is not None and heads[1] is not None
    assert heads[0][0] == heads[1][0] == rounds
    servers = [
        {name: value for name, value in head[1].items() if name != "rows/index"}
        for head in heads
        if head is not None
    ]
    assert same_bits(servers[0], servers[1])
