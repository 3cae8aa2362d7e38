"""The choice of a plan: what cannot run is no candidate, and the bits of one plan do not depend on whether the other was tried."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdfast
from holdfast.core.errors import RunError
from holdfast.results import Run
from tests.helpers import everything, tiny


class Recurrent(nn.Module):
    """vmap has no rule for an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x[:, 0])[0][:, -1])


class Normed(nn.Module):
    """vmap's rule for group_norm does not take channels that lie innermost; for one client they may."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(144, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.group_norm(self.conv(x), 2).flatten(1))


def test_auto_takes_the_plan_that_can_run(tmp_path: Path) -> None:
    run = holdfast.run(tiny(model=holdfast.Model(Recurrent, head="fc"), engine={"plan": "auto"}), out=tmp_path / "run")
    assert run.manifest["plan"]["name"] == "loop" and run.round == 2


def test_a_plan_that_was_asked_for_fails_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="a first step on plan vmap failed: RuntimeError"):
        holdfast.run(tiny(model=holdfast.Model(Recurrent, head="fc"), engine={"plan": "vmap"}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_trying_vmap_does_not_change_the_bits_of_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.local import forecast

    monkeypatch.setattr(forecast, "_CLEARLY", 0.0)  # auto tries both and always takes loop
    runs = {}
    for plan in ("auto", "loop"):
        config = tiny(model=holdfast.Model(Normed, head="fc"), engine={"plan": plan}, train={"dtype": "float32"})
        runs[plan] = holdfast.run(config, out=tmp_path / plan)
        assert runs[plan].manifest["plan"]["name"] == "loop"
    a, b = (everything(Run(run.path, run.config)) for run in runs.values())
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
