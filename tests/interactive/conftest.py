"""One small sweep that all tests of this folder read."""

from __future__ import annotations

import pytest

import holdfast
from holdfast.methods.ditto import Ditto
from tests.experiment.sessions import TINY


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> holdfast.Sweep:
    return holdfast.sweep(
        TINY,
        out=tmp_path_factory.mktemp("sweep") / "s",
        method=["fedavg", Ditto(lam=0.5), {"name": "fedprox", "mu": 0.1}],
        seed=range(2),
    )
