"""The choice of a plan: what cannot run is no candidate, and the bits of one plan do not depend on whether
the other was tried."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdfast
from holdfast.core.errors import RunError
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.local import plan_choice
from holdfast.local.fit import Recipe
from holdfast.local.plan import bytes_per_row
from holdfast.results.run import Run
from tests.helpers import deal, everything, network_of, random_samples, tiny


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
    run = holdfast.run(
        tiny(model=holdfast.Model(Recurrent, head="fc"), engine={"plan": "auto"}), out=tmp_path / "run"
    )
    assert run.manifest["plan"]["name"] == "loop" and run.round == 2


def test_a_plan_that_was_asked_for_fails_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="a first step on plan vmap failed: RuntimeError"):
        holdfast.run(
            tiny(model=holdfast.Model(Recurrent, head="fc"), engine={"plan": "vmap"}), out=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


def test_trying_vmap_does_not_change_the_bits_of_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_choice, "_CLEARLY", 0.0)  # auto tries both and always takes loop
    runs = {}
    for plan in ("auto", "loop"):
        config = tiny(
            model=holdfast.Model(Normed, head="fc"), engine={"plan": plan}, train={"dtype": "float32"}
        )
        runs[plan] = holdfast.run(config, out=tmp_path / plan)
        assert runs[plan].manifest["plan"]["name"] == "loop"
    a, b = (everything(Run(run.path, run.config)) for run in runs.values())
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    times: dict[str, float],
    rows: int = 10,
    memory: int = 10**9,
    counts: Sequence[int] = (20, 20),
    client_steps: float = 0.0,
) -> plan_choice.Forecast:
    """The choice where a client's step takes so many microseconds: nothing is timed."""
    monkeypatch.setattr(
        plan_choice, "_compare", lambda plans, trial, rows: {name: times[name] for name in plans}
    )
    network, samples = network_of(lambda: nn.Linear(3, 3)), random_samples(sum(counts))
    data, recipe = deal(samples, counts), Recipe(batch_size=4)
    return plan_choice.choose(
        asked,
        network,
        network.initial(Key(0)),
        samples,
        data,
        recipe,
        rows,
        memory,
        client_steps=client_steps,
    )


@pytest.mark.parametrize(
    ("vmap", "plan"), [(50.0, "vmap"), (94.0, "vmap"), (95.0, "loop"), (100.0, "loop"), (200.0, "loop")]
)
def test_auto_takes_vmap_where_it_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, vmap: float, plan: str
) -> None:
    found = chosen(monkeypatch, "auto", {"loop": 100.0, "vmap": vmap})
    assert found.plan.name == plan and found.plan.microseconds == found.measured[plan]
    assert found.seconds(1000) == pytest.approx(found.measured[plan] * 1e-3)


def row_bytes() -> tuple[int, int]:
    """Of the linear model above, of 12 parameters in float64: in training (ten times its tensors; 4 samples
    of 3 numbers and their 3 outputs, half as much again), and while it waits (six models)."""
    return 8 * (10 * 12 + 3 * 4 * (3 + 3) // 2), 8 * 6 * 12


@pytest.mark.parametrize("plan", ["loop", "vmap"])
def test_the_announced_memory_has_rows_that_wait_for_their_turn(
    monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    """One by one, nine of ten models wait; stacked by four, six of them."""
    training, waiting = row_bytes()
    monkeypatch.setattr("holdfast.local.plan._CACHED", 4 * training)
    together = {"loop": 1, "vmap": 4}[plan]
    assert chosen(monkeypatch, plan, {plan: 1.0}).memory == training * together + waiting * (10 - together)
    assert chosen(monkeypatch, plan, {plan: 1.0}, rows=together).memory == training * together


def test_sizes_of_programs_hold_no_more_than_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where most clients have little data a program of half the rows saves time; it has to fit beside the
    whole one."""
    training, times, ragged = row_bytes()[0], {"compiled-vmap": 30.0}, [4] * 9 + [400]
    found = [
        chosen(monkeypatch, "compiled-vmap", times, 16, room * training, ragged, 1e9).plan
        for room in (16 + 8, 16 + 7)
    ]
    assert [plan.sizes for plan in found] == [(8, 16), (16,)]


def test_the_optimisers_state_counts_as_memory() -> None:
    """Adam keeps two tensors where SGD keeps one; a state that is kept is also read and written."""
    network = network_of(lambda: nn.Linear(3, 3))
    sample, one = torch.zeros(3, dtype=torch.float64), network.layout.size * 8
    sgd, adam, kept = (
        bytes_per_row(network, sample, 5, build("optimizer", given).held())
        for given in ("sgd", "adam", {"name": "adam", "persist": True})
    )
    assert sgd == bytes_per_row(network, sample, 5)
    assert (adam - sgd, kept - sgd) == (one, 5 * one)
