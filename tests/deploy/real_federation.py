"""Federations of real processes on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from holdfast.deploy.ledger_check import LedgerCheck
from holdfast.deploy.processes import free_port
from holdfast.deploy.project import Project, init, open_project
from holdfast.deploy.up import RunningFederation
from holdfast.experiment.config import make_config
from holdfast.experiment.config_tables import read_config
from holdfast.storage.store import Store
from holdfast.sweeps.session import start

EXPERIMENT = """
seed = 3
[data]
clients = {clients}
partition = {{ name = "dirichlet", beta = 0.5 }}
[model]
name = "mlp"
hidden = 16
[method]
name = "{method}"
[train]
rounds = {rounds}
local_epochs = 1
[engine]
plan = "loop"
threads = 1
"""


PATIENT = 1500.0  # seconds: a busy machine needs minutes for what an idle one does in one


def found(
    folder: Path, clients: int = 3, rounds: int = 2, method: str = "fedavg", **settings: Any
) -> Project:
    experiment = folder / "experiment.toml"
    experiment.write_text(EXPERIMENT.format(clients=clients, rounds=rounds, method=method))
    project = init(folder / "ward", clients, port=free_port(), experiment=experiment)
    lines = (project.path / "federation.toml").read_text().splitlines()
    wanted = {"deadline": 120.0, "quorum": 0.0, **settings}
    kept = [line for line in lines if line.partition(" =")[0] not in wanted]
    (project.path / "federation.toml").write_text(
        "\n".join([*kept, *(f"{key} = {value}" for key, value in wanted.items())]) + "\n"
    )
    return open_project(project.path)


def run_federation(
    project: Project,
    cheats: dict[int, str] | None = None,
    disturb: Callable[[RunningFederation, str], None] | None = None,
) -> tuple[RunningFederation, list[str]]:
    """Play to the end. `cheats` are lines of Python that change `content`, what a node replies; `disturb`
    sees every line said."""
    said: list[str] = []
    running: list[RunningFederation] = []

    def say(line: str) -> None:
        said.append(line)
        if disturb is not None and running:
            disturb(running[0], line)

    up = RunningFederation(project, say)
    for client, code in (cheats or {}).items():
        path = os.pathsep.join([cheat(project, client, code), up.processes.environment()["PYTHONPATH"]])
        up.processes.extra[f"node{client}"] = {"PYTHONPATH": path}
    with up:
        running.append(up)
        up.run(timeout=PATIENT)
    assert not up.processes.alive()
    checks = list(LedgerCheck(project.ledger_file, project.run).examine(project.ledger().head))
    assert len(checks) == 5 and all(check.good for check in checks), checks
    return up, said


def cheat(project: Project, client: int, code: str) -> str:
    """A folder whose sitecustomize makes the ClientApp of one node lie."""
    folder = project.path / f"cheat{client}"
    folder.mkdir(exist_ok=True)
    body = "\n".join(f"        {line}" for line in code.splitlines())
    (folder / "sitecustomize.py").write_text(
        "import numpy as np\nimport holdfast.deploy.messaging as post\nfrom flwr.app import Array,"
        " ArrayRecord, ConfigRecord, RecordDict\nhonest = post.answer\ndef answer(content, message):\n    if"
        f" message.metadata.message_type == 'train':\n        fields = content['fields']\n{body}\n    return"
        " honest(content, message)\npost.answer = answer\n"
    )
    return str(folder)


def model_of(run: Path) -> torch.Tensor:
    head = Store(run).head()
    assert head is not None
    return head[1]["server/model"]


def simulated(project: Project, out: Path) -> Path:
    start([("", make_config(read_config(project.experiment)))], out)
    return out
