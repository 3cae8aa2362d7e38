"""Runs that the tests of this folder read; played once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from holdfast.experiment.config import make_config
from holdfast.report.markup import Section
from holdfast.sweeps.grid import expand
from holdfast.sweeps.session import start

TINY: dict[str, Any] = {
    "method": {"name": "fedavg"},
    "data": {"clients": 4, "partition": {"name": "dirichlet", "beta": 0.5, "samples_per_client": 40}},
    "train": {"rounds": 3, "local_epochs": 1},
    "engine": {"plan": "loop", "threads": 1},
}


def sweep(folder: Path, **sections: Any) -> Path:
    start([(label, make_config(table)) for label, table in expand({**TINY, **sections})], folder)
    return folder


def text_of(*sections: Section | None) -> str:
    """The sections as HTML."""
    known = [section for section in sections if section is not None]
    return "".join(f"<section><h2>{escape(one.title)}</h2>{one.body}</section>" for one in known)


@pytest.fixture(scope="session")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods under two seeds, one of them with a setting of its own."""
    override = [{"when": {"method.name": "ditto"}, "set": {"method.lam": 0.5}}]
    axes = {"method.name": ["local", "fedavg", "ditto"], "seed": [0, 1]}
    return sweep(tmp_path_factory.mktemp("runs") / "grid", sweep={**axes, "override": override})


@pytest.fixture(scope="session")
def duel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, without an attack and under two, two seeds each."""
    axes = {"method.name": ["fedavg", "fedcap"], "attack.name": ["none", "ipm", "sign-flip"], "seed": [0, 1]}
    return sweep(
        tmp_path_factory.mktemp("runs") / "duel",
        attack={"fraction": 0.25},
        train={"rounds": 2, "local_epochs": 1},
        sweep=axes,
    )


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sweep(tmp_path_factory.mktemp("runs") / "single")
