"""Runs whose clients are trained by worker processes: the same numbers, and the same way out when something
goes wrong."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.errors import ConfigError, RunError
from holdfast.core.registry import register
from holdfast.core.types import Exchange
from holdfast.engine import simulator
from holdfast.engine.simulator import without_unused_models
from holdfast.engine.workers import Pool
from holdfast.experiment import manifest, planner
from holdfast.experiment.config import make_config
from holdfast.experiment.runner import RunCallbacks
from holdfast.local.plan import Plan
from holdfast.local.plan_choice import Forecast
from holdfast.methods import ClientRule, Method
from holdfast.methods.averaging import Averaging
from holdfast.results.run import Run
from holdfast.sweeps import session
from tests.helpers import assert_same, everything, methods_in_turn, run_all, tiny

PARENT = os.getpid()


class Plain(ClientRule):
    def train(self, local: Any, state: Any, received: Any, extra: Any) -> Any:
        self.happens(local)
        fitted = local.fit(received.model)
        return {"personal": local.fit(state["personal"], purpose="own").model}, local.report(
            fitted.model, received, fitted
        )

    def init(self, local: Any) -> Any:
        return {"personal": local.initial}

    def personal(self, local: Any, state: Any, received: Any) -> Any:
        return state["personal"]

    def happens(self, local: Any) -> None:
        pass


class Mortal(Plain):
    def happens(self, local: Any) -> None:
        if local.round == 2 and 3 in local.ids and os.getpid() != PARENT:
            os.kill(os.getpid(), signal.SIGKILL)


class Stumbling(Plain):
    def happens(self, local: Any) -> None:
        if local.round == 2 and 3 in local.ids:
            raise ZeroDivisionError("the client fell")


class Counting(Plain):
    """Trains less and less, by a counter of its own."""

    def __init__(self, method: Any):
        super().__init__(method)
        self.cache, self.calls = None, 0

    def happens(self, local: Any) -> None:
        self.cache = self.cache or {"filled": True}
        if local.round == 2:
            self.calls += 1


@register("method", "test-mortal")
class MortalMethod(Method):
    """Its workers are killed in the second round."""

    Client, Server = Mortal, Averaging
    models = ("global", "personal")


@register("method", "test-tripping")
class TrippingMethod(Method):
    """Some of its clients fail in the second round."""

    Client, Server = Stumbling, Averaging
    models = ("global", "personal")


@register("method", "test-counting")
class CountingMethod(Method):
    """Keeps something in the client half."""

    Client, Server = Counting, Averaging


def same_bits(a: Run, b: Run) -> None:
    one, other = everything(a), everything(b)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("method", methods_in_turn(often=("fedavg", "c-pfl")))
def test_on_plan_loop_workers_change_no_bit(method: str, simulate: Callable[..., Run]) -> None:
    data = {"split": {"train": 0.6, "validation": 0.2, "test": 0.2}}
    train = {"dtype": "float32", "participation": 0.8, "dropout": 0.1}
    alone, two, three = (
        simulate(
            method=method,
            data=data,
            train=train,
            engine={"plan": "loop", "workers": count},
            evaluate={"unselected": "finetune"},
        )
        for count in (1, 2, 3)
    )
    same_bits(alone, two)
    same_bits(alone, three)


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_on_plan_vmap_workers_change_the_last_bits_at_most(method: str, simulate: Callable[..., Run]) -> None:
    one, two = (simulate(method=method, train={"rounds": 3}, engine={"workers": count}) for count in (1, 2))
    assert two.manifest["plan"]["workers"] == 2 and two.manifest["threads"] == 1
    assert_same(everything(one), everything(two), 1e-10)


def test_a_sweep_has_the_same_bits_with_workers(simulate_all: Callable[..., list[Run]]) -> None:
    """Cells share chunks, and two groups share the workers."""
    pulled, longer = (
        {"method": {"name": "ditto", "lam": 2.0}, "seed": 1},
        {"method": "fedavg", "train": {"rounds": 4}},
    )
    changes: list[dict[str, Any]] = [{"method": "ditto"}, pulled, longer]
    both = [
        simulate_all([{**c, "engine": {"plan": "loop", "workers": count}} for c in changes])
        for count in (1, 2)
    ]
    for one, two in zip(*both, strict=True):
        same_bits(one, two)


def test_the_numbers_do_not_depend_on_which_worker_did_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that began with workers goes on where there are none, with the same bits, also in float32 on plan
    vmap."""
    sections = {"method": "ditto", "train": {"dtype": "float32"}, "engine": {"workers": 3}}
    (with_workers,) = run_all([sections], tmp_path / "with")
    forked: list[int] = []
    monkeypatch.setattr(simulator, "can_fork", lambda: bool(forked.append(1)))
    (without,) = run_all([sections], tmp_path / "without")
    assert forked
    same_bits(with_workers, without)


def test_workers_keep_a_small_memory_bound(simulate: Callable[..., Run]) -> None:
    """The bound holds for all of them together: each has a share of the rows."""
    large, small = (
        simulate(method="ditto", engine={"plan": "loop", "workers": 2, "memory": memory})
        for memory in ("1GB", "100KB")
    )
    rows = [run.manifest["plan"]["rows"] for run in (large, small)]
    assert rows[0] == 1024 and rows[1] < 5
    same_bits(large, small)


def test_no_worker_process_is_left_after_a_run(simulate: Callable[..., Run]) -> None:
    simulate(engine={"workers": 2})
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.filterwarnings("ignore:worker process")
def test_a_killed_worker_stops_the_run_where_it_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(method="test-mortal", train={"rounds": 3}, engine={"plan": "loop", "workers": 2})
    with pytest.raises(RunError, match=r"worker process \d of 2 \(process \d+\) was ended by SIGKILL"):
        session.start([("", config)], tmp_path / "run")
    assert Run(tmp_path / "run").round == 1
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    monkeypatch.setattr(Mortal, "happens", Plain.happens)
    session.resume(tmp_path / "run")
    session.start([("", config)], tmp_path / "whole")
    same_bits(Run(tmp_path / "run"), Run(tmp_path / "whole"))


@pytest.mark.filterwarnings("ignore:worker process")
@pytest.mark.parametrize(
    ("method", "engine", "error"),
    [
        ("test-mortal", {"workers": 2}, "worker process"),
        ("test-tripping", {"workers": 2}, "ZeroDivisionError: the client fell"),
        ("test-tripping", {"workers": 1, "memory": "50KB"}, "ZeroDivisionError: the client fell"),
    ],
)
def test_an_experiment_that_fails_does_not_stop_the_others(
    tmp_path: Path, method: str, engine: dict[str, Any], error: str
) -> None:
    """Those that shared its stacks are asked again, and start from the rows they had, not from what the
    failed exchange wrote."""
    common = {
        "method": method,
        "train": {"rounds": 3, "participation": 0.4},
        "engine": {"plan": "loop", **engine},
    }
    tables = [
        {**common, "seed": seed} for seed in (4, 5, 0, 1)
    ]  # the first two live: their rows are written when the others fail
    with pytest.raises(
        RunError, match=f"of 4 experiments failed, the others are finished: .* in round 2: {error}"
    ):
        session.start([(f"seed {table['seed']}", tiny(**table)) for table in tables], tmp_path / "sweep")
    runs = [Run(folder) for folder in manifest.run_folders(tmp_path / "sweep")]
    lived = [(run, table) for run, table in zip(runs, tables, strict=True) if run.round == 3]
    assert lived and {run.round for run in runs} == {1, 3}
    for run, table in lived:
        same_bits(
            run,
            run_all(
                [{**table, "engine": {"plan": "loop", "workers": 1}}], tmp_path / f"alone {table['seed']}"
            )[0],
        )


def test_a_worker_that_is_killed_once_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells of a sweep are asked again together: one by one, BatchNorm on plan vmap would have other last
    bits."""
    norm = {"name": "mlp", "hidden": 6, "batch_norm": True}
    common = {
        "model": norm,
        "method": "test-mortal",
        "train": {"dtype": "float32", "rounds": 3},
        "engine": {"plan": "vmap", "workers": 2},
    }
    tables: list[dict[str, Any]] = [{**common, "seed": seed} for seed in (0, 1)]
    killed = tmp_path / "killed"

    def happens(self: Any, local: Any) -> None:
        if local.round == 2 and os.getpid() != PARENT and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Mortal, "happens", Plain.happens)
    whole = run_all(tables, tmp_path / "whole")
    monkeypatch.setattr(Mortal, "happens", happens)
    with pytest.warns(RuntimeWarning, match="worker process . of 2 .* its round goes on with new ones"):
        disturbed = run_all(tables, tmp_path / "disturbed")
    assert killed.exists()
    for one, other in zip(whole, disturbed, strict=True):
        same_bits(one, other)


def test_a_client_half_that_keeps_state_runs_in_the_parent_process(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"method": "test-counting", "engine": {"plan": "loop", "workers": 2}}
    with pytest.warns(RuntimeWarning, match=r"Counting\.calls changes from call to call"):
        (two,) = run_all([sections], tmp_path / "two")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (one,) = run_all([{**sections, "engine": {"plan": "loop", "workers": 1}}], tmp_path / "one")
    same_bits(one, two)


def test_resumed_with_the_workers_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = run_all([{"engine": {"workers": 2}}], tmp_path / "run")
    (run.path / "result.json").unlink()
    (run.path / "head.json").unlink()
    sizes = []
    made = Pool.__init__
    monkeypatch.setattr(
        Pool, "__init__", lambda self, count, work: sizes.append(count) or made(self, count, work)
    )
    session.resume(run.path)
    assert sizes == [2]


def test_a_manifest_from_before_there_were_workers(tmp_path: Path) -> None:
    (run,) = run_all([{}], tmp_path / "run")
    file = run.path / "manifest.json"
    old = json.loads(file.read_text())
    del old["plan"]["workers"], old["config"]["engine"]["workers"]
    file.write_text(json.dumps(old))
    (run.path / "result.json").unlink()
    assert (
        session.resume(run.path, config=run.config)[0]["rounds"] == 2
        and session.resume(run.path)[0]["rounds"] == 2
    )


def test_a_worker_is_sent_the_models_its_clients_get() -> None:
    asked = Exchange(
        "train", torch.tensor([1, 4]), torch.arange(10.0).view(5, 2), torch.tensor([[4, -1], [1, 4]])
    )
    small = without_unused_models(asked)
    assert len(small.bank) == 3
    for before, after in zip(asked.pick.flatten().tolist(), small.pick.flatten().tolist(), strict=True):
        assert before == after == -1 or torch.equal(asked.bank[before], small.bank[after])
    same = Exchange("train", torch.tensor([1]), torch.zeros(1, 2), torch.zeros(1, 1, dtype=torch.int64))
    assert without_unused_models(same) is same


@pytest.fixture
def promised(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Microseconds of a step in one process, and with workers, in place of a trial."""
    times = {"one": 1000.0, "shared": 1000.0}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(planner, "usable_cores", lambda: 2)

    def told(experiments: Any, device: Any, workers: int = 1) -> dict[str, Forecast]:
        micro = times["one" if workers == 1 else "shared"]
        times["tried"] = max(workers, times.get("tried", 0))
        return {
            e.run_context.plan_key: Forecast(Plan(microseconds=micro, workers=workers), {"loop": micro}, 0)
            for e in experiments
        }

    monkeypatch.setattr(planner, "_forecasts", told)
    return times


@pytest.mark.parametrize(
    ("shared", "rounds", "engine", "tried", "taken"),
    [
        (600.0, 10_000, {}, 2, 2),
        (950.0, 10_000, {}, 2, 1),
        (100.0, 2, {}, 1, 1),
        (100.0, 10_000, {"workers": 1}, 1, 1),
        (5000.0, 2, {"workers": 4}, 4, 4),
        (100.0, 10_000, {"threads": 2}, 1, 1),
    ],
)
def test_when_workers_are_taken(
    shared: float,
    rounds: int,
    engine: dict[str, int],
    tried: int,
    taken: int,
    promised: dict[str, float],
    tmp_path: Path,
) -> None:
    from holdfast.experiment.loop import Experiment

    promised["shared"] = shared
    asked = {"plan": "loop", "threads": None, **engine}
    experiment = Experiment(tiny(train={"rounds": rounds}, engine=asked), tmp_path / "run")
    threads, forecasts = planner.plan_together([experiment], torch.device("cpu"), asked["threads"])
    (forecast,) = forecasts.values()
    assert (promised["tried"], forecast.plan.workers) == (tried, taken)
    assert ("worker processes" in planner.sentence(forecast, [experiment], threads)) == (taken > 1)


def test_a_measured_choice_is_said_and_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_LONG", 0.0)
    monkeypatch.setattr(planner, "usable_cores", lambda: 2)
    monkeypatch.setattr(planner, "_CLEARLY", float("inf"))  # the last way that was tried is taken
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    said: list[str] = []
    session.start(
        [("", tiny(engine={"plan": "auto", "threads": None}))],
        tmp_path / "run",
        RunCallbacks(say=said.append),
    )
    assert (
        "2 worker processes of 1 thread" in said[0] and Run(tmp_path / "run").manifest["plan"]["workers"] == 2
    )


def test_impossible_numbers_of_workers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engine.threads is 2"):
        session.start([("", tiny(engine={"workers": 2, "threads": 2}))], tmp_path / "run")
    with pytest.raises(ConfigError, match="engine.workers"):
        make_config({"engine": {"workers": 0}})
    with pytest.raises(ConfigError, match="train on the CPU, not on cuda"):
        planner._check_workers(torch.device("cuda"), None)
