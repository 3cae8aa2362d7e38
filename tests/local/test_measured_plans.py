"""What trials of plans measured on a GPU is found again for the same work only, and only where it is sound.
The trials run on the CPU here, as on a device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.experiment import planner
from holdfast.experiment.loop import Experiment
from holdfast.local import compiled_code, device_trials, measured_plans
from holdfast.local.fit import Recipe
from holdfast.local.measured_plans import Entry, Measured
from holdfast.local.plan import Plan
from holdfast.local.plan_choice import Forecast, _Trial
from holdfast.models.network import Network
from tests.helpers import deal, random_samples, starts, tiny

MICRO = {"captured-loop": 200.0, "captured-vmap": 60.0, "compiled-vmap": 30.0}
LONG = 1e7  # steps of clients, for which compiling pays


class Timed:
    """A trial of a real network whose times are given; it counts how often it is asked for one."""

    def __init__(
        self, width: int = 3, loss: Any = None, batch_size: int = 4, micro: dict[str, float] | None = None
    ):
        self.micro = micro or MICRO
        samples = random_samples(60)
        network = Network(lambda: nn.Linear(3, width), head=None, signature=f"timed {id(self)}")
        recipe = Recipe(batch_size=batch_size) if loss is None else Recipe(batch_size=batch_size, loss=loss)
        data = deal(samples, [8, 4, 12])
        self.trial, self.asked = _Trial(network, starts(network, 1)[0], samples, data, recipe), 0

    def traced(self, plan: Plan, rows: int) -> Any:
        return self.trial.traced(plan, rows)

    def seconds(self, plan: Plan, rows: int, steps: int) -> float:
        self.asked += 1
        return self.micro[plan.name] * 1e-6

    def measure(self, client_steps: float = LONG, precision: Any = "fp32", rows: int = 6) -> Measured:
        plans = {name: Plan(name, precision=precision, sizes=(rows,)) for name in self.micro}  # type: ignore[arg-type]
        trials = device_trials.measured(plans, self, rows, client_steps, (rows,), torch.device("cpu"), "")
        return device_trials.finished(trials)


@pytest.fixture(autouse=True)
def nothing_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_trials, "compile_ahead", lambda steps: None)


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "plans").glob("*.json"))


def test_a_second_start_takes_the_plan_without_a_trial_and_says_so(tmp_path: Path) -> None:
    first, second = Timed(), Timed()
    assert first.measure().sentence() == "" and first.asked == 3 * 5
    found = second.measure()
    assert second.asked == 0 and dict(found.times) == pytest.approx(MICRO)
    (entry,) = entries(tmp_path)
    assert found.sentence() == f"measured on {found.when}; delete {entry} to measure again"
    entry.unlink()
    assert second.measure().place is None and second.asked == 15


def test_other_work_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Timed().measure()
    others: list[tuple[Timed, dict[str, Any]]] = [
        (Timed(width=4), {}),
        (Timed(batch_size=5), {}),
        (Timed(loss=lambda net, batch: (net(batch.x) ** 2).sum(1)), {}),
        (Timed(), {"precision": "bf16"}),
        (Timed(), {"rows": 5}),
    ]
    for trial, settings in others:
        trial.measure(**settings)
        assert trial.asked, settings
    monkeypatch.setattr(compiled_code, "__version__", "another version")
    trial = Timed()
    trial.measure()
    assert trial.asked
    monkeypatch.setattr(measured_plans, "machine", lambda device: {"name": "another GPU"})
    trial = Timed()
    trial.measure()
    assert trial.asked
    assert len(entries(tmp_path)) == 1 + len(others) + 2


def test_a_plan_that_was_not_tried_because_the_run_was_short_is_tried_in_a_long_one(tmp_path: Path) -> None:
    assert "compiled-vmap" not in Timed().measure(client_steps=1000).times
    trial = Timed()
    assert "compiled-vmap" in trial.measure().times and trial.asked == 15
    again = Timed()
    again.measure()
    assert not again.asked and len(entries(tmp_path)) == 1


def test_the_compiled_form_of_a_stack_is_tried_beside_single_clients_that_are_a_little_faster() -> None:
    """On an H200, FedCAP's network: clients side by side 66 us, captured stack 80, compiled below 10."""
    micro = {"captured-loop": 66.0, "captured-vmap": 80.0, "compiled-loop": 50.0, "compiled-vmap": 9.0}
    found = Timed(micro=micro).measure()
    assert set(found.times) == {"captured-loop", "captured-vmap", "compiled-vmap"}
    assert min(found.times, key=lambda name: found.times[name]) == "compiled-vmap"


def test_single_clients_that_are_far_faster_than_a_stack_are_compiled_where_the_run_is_long() -> None:
    micro = {"captured-loop": 4600.0, "captured-vmap": 12000.0, "compiled-loop": 3900.0, "compiled-vmap": 1.0}
    steps_of = {seconds: seconds / micro["captured-loop"] * 1e6 for seconds in (390.0, 410.0)}
    assert set(Timed(micro=micro).measure(steps_of[390.0]).times) == {"captured-loop", "captured-vmap"}
    found = Timed(micro=micro).measure(steps_of[410.0])
    assert set(found.times) == {"captured-loop", "captured-vmap", "compiled-loop"}


def test_a_damaged_entry_is_measured_again_and_replaced(tmp_path: Path) -> None:
    entry = Entry({"format": 1, "step": "of this test"})
    entry.write(Measured({"captured-vmap": 60.0}, ("captured-loop",)))
    (file,) = entries(tmp_path)
    whole, found = file.read_text(), entry.read()
    assert found and found.tried == {"captured-loop", "captured-vmap"}
    damages = [
        whole[: len(whole) // 2],
        "",
        "[1]",
        changed(whole, about={"format": 1, "step": "other"}),
        changed(whole, times={}),
        changed(whole, times={"captured-vmap": "60"}),
        changed(whole, times={"captured-vmap": -1.0}),
        changed(whole, times={"captured-vmap": 1e300}),
        changed(whole, times={"captured-vmap": True}),
        changed(whole, times={"warp": 1.0}),
        changed(whole, when="yesterday"),
        changed(whole, refused=7),
    ]
    for damaged in damages:
        file.write_text(damaged)
        assert entry.read() is None, damaged
    Timed().measure()
    for file in entries(tmp_path):
        file.write_text("{")
    trial = Timed()
    assert dict(trial.measure().times) == pytest.approx(MICRO) and trial.asked
    again = Timed()
    assert again.measure().place and not again.asked


def changed(text: str, **fields: Any) -> str:
    return json.dumps(json.loads(text) | fields)


def test_where_nothing_can_be_kept_every_start_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        trial = Timed()
        assert trial.measure().place is None and trial.asked


def test_a_trial_makes_the_program_that_the_run_needs() -> None:
    """Momentum, weight decay and a schedule stay: without them the compiled program would be of no use."""
    trial = Timed().trial
    whole = replace(
        trial, recipe=replace(trial.recipe, momentum=0.9, drop_last=True, schedule=lambda n: [1.0] * n)
    )
    short = whole._short(Plan("compiled-vmap"), 2)
    assert short == replace(whole.recipe, steps=2, lr=1e-6)
    assert whole._short(Plan("vmap"), 2).momentum == 0.0


def test_programs_of_several_networks_are_compiled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """All captured plans are tried first; then the compiler gets the steps of both networks, all sizes of
    each, before any compiled plan is tried."""
    seen: list[Any] = []
    monkeypatch.setattr(
        device_trials, "compile_ahead", lambda jobs: seen.append([job[0].operations.digest for job in jobs])
    )

    class Noted(Timed):
        def seconds(self, plan: Plan, rows: int, steps: int) -> float:
            seen.append(plan.name)
            return super().seconds(plan, rows, steps)

    plans = {name: Plan(name, sizes=(3, 6)) for name in MICRO}  # type: ignore[arg-type]
    trials = {
        str(width): device_trials.measured(plans, Noted(width), 6, LONG, (6, 3), torch.device("cpu"), "")
        for width in (3, 4)
    }
    found = device_trials.all_finished(trials)
    assert all(dict(one.times) == pytest.approx(MICRO) for one in found.values())
    (place,) = [i for i, what in enumerate(seen) if isinstance(what, list)]
    assert len(set(seen[place])) == 2 * 2
    assert set(seen[:place]) == {"captured-loop", "captured-vmap"} and set(seen[place + 1 :]) == {
        "compiled-vmap"
    }


def test_the_announcement_says_where_remembered_times_come_from(tmp_path: Path) -> None:
    forecast = Forecast(Plan("captured-vmap"), {"captured-vmap": 60.0}, 0, "measured on 2026-11-18; delete F")
    said = planner.sentence(forecast, [Experiment(tiny(), tmp_path / "run")], 1, cost=False)
    times = "captured-vmap 60 us; measured on 2026-11-18; delete F"
    assert said == f"plan captured-vmap, 1 thread (per client step: {times})"
