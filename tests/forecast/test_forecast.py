"""What a run will take, said beforehand: counts exactly, bytes nearly, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.cli import main
from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.experiment.config import make_config
from holdfast.experiment.loop import Experiment
from holdfast.experiment.runner import RunCallbacks
from holdfast.forecast.extrapolation import MeasuredRounds, evaluations, forecast_seconds, line
from holdfast.forecast.measure import forecast_cost
from holdfast.forecast.participation import expected_participation
from holdfast.forecast.short_rounds import (
    ShortRoundEngine,
    TimedExchange,
    TrainingWork,
    computed_rows,
    own_steps,
    shares,
)
from holdfast.local.fit import Recipe
from holdfast.local.plan import Plan
from tests.cli.failing_method import FallsMethod
from tests.helpers import TINY

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted does not depend on how often it is tried."""
    monkeypatch.setattr("holdfast.forecast.measure._ROUNDS", (3, 4))


def table(**sections: Any) -> dict[str, Any]:
    merged: dict[str, Any] = {**TINY}
    for name, value in sections.items():
        merged[name] = (
            {**merged[name], **value}
            if isinstance(value, dict) and isinstance(merged.get(name), dict)
            else value
        )
    return merged


def bytes_in(folder: Path) -> tuple[int, int]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files), len(files)


# ---- cells, groups and steps


def test_the_forecast_of_a_mixed_grid(tmp_path: Path) -> None:
    """fedavg and ditto are two groups; batches of another size are two more. Learning rate and seed split
    nothing."""
    iid = {"name": "iid", "samples_per_client": 20}
    given = table(
        data={"partition": iid, "split": {"train": 0.5, "test": 0.5}},
        train={"rounds": 7, "local_epochs": 3},
        sweep={"method.name": ["fedavg", "ditto"], "train.batch_size": [5, 4], "seed": [0, 1]},
    )
    found = holdfast.plan(given, out=tmp_path / "runs" / "table")
    assert [(group.cells, group.rows, group.client_steps) for group in found.groups] == [
        # 5 clients of 10 samples: 2 or 3 steps an epoch, 3 epochs, 7 rounds; ditto trains two models
        (("fedavg batch_size=5 seed=0", "fedavg batch_size=5 seed=1"), 10, 2 * 5 * 2 * 3 * 7),
        (("fedavg batch_size=4 seed=0", "fedavg batch_size=4 seed=1"), 10, 2 * 5 * 3 * 3 * 7),
        (("ditto batch_size=5 seed=0", "ditto batch_size=5 seed=1"), 20, 2 * 2 * 5 * 2 * 3 * 7),
        (("ditto batch_size=4 seed=0", "ditto batch_size=4 seed=1"), 20, 2 * 2 * 5 * 3 * 3 * 7),
    ]
    assert found.client_steps == sum(group.client_steps for group in found.groups) and len(found.cells) == 8
    for group in found.groups:
        assert (group.plan, group.precision, group.workers, group.threads, group.stack) == (
            "vmap",
            "fp32",
            1,
            1,
            group.rows,
        )
        assert group.microseconds and group.microseconds > 0
    assert list(tmp_path.iterdir()) == []


def test_a_shard_has_its_own_forecast(tmp_path: Path) -> None:
    given = table(sweep={"method.name": ["fedavg", "ditto"], "seed": [0, 1]})
    found = holdfast.plan(given, out=tmp_path / "table", shard=(2, 2))
    assert found.cells == ("ditto seed=0", "ditto seed=1") and len(found.groups) == 1
    with pytest.raises(ConfigError, match="shard 1/9 is empty: the sweep has 4 cells"):
        holdfast.plan(given, out=tmp_path / "table", shard=(1, 9))
    with pytest.raises(ConfigError, match="nothing to divide"):
        holdfast.plan(table(), out=tmp_path / "run", shard=(1, 2))


@pytest.mark.parametrize(
    ("recipe", "steps"),
    [
        (Recipe(epochs=2, batch_size=5), [0, 2, 2, 4, 6]),
        (Recipe(epochs=2, batch_size=5, drop_last=True), [0, 0, 2, 2, 4]),
        (Recipe(steps=3, batch_size=5), [0, 3, 3, 3, 3]),
        (Recipe(steps=3, batch_size=5, drop_last=True), [0, 0, 3, 3, 3]),
    ],
)
def test_own_steps_by_hand(recipe: Recipe, steps: list[int]) -> None:
    assert own_steps(torch.tensor([0, 4, 5, 9, 11]), recipe).tolist() == steps


@pytest.mark.parametrize(
    "train", [{"local_epochs": 2}, {"local_steps": 3}, {"local_epochs": 2, "drop_last": True}]
)
def test_steps_of_ragged_clients_that_are_drawn(tmp_path: Path, train: dict[str, Any]) -> None:
    """Every cohort of the run is counted, by hand."""
    ragged = {"name": "dirichlet", "beta": 0.5}
    given = table(
        method="ditto", train={**train, "rounds": 9, "participation": 0.4}, data={"partition": ragged}
    )
    found = holdfast.plan(given, out=tmp_path / "run")
    experiment, wanted = Experiment(make_config(given), tmp_path / "run"), 0
    counts = experiment.run_context.federation.train.counts.tolist()
    assert len(set(counts)) > 1
    for round in range(1, 10):
        for client in experiment.participation.cohort(
            round, experiment.participation.available(round)
        ).tolist():
            epoch = counts[client] // 5 if train.get("drop_last") else -(-counts[client] // 5)
            wanted += 2 * (epoch * 2 if "local_epochs" in train else 3 if epoch else 0)
    assert found.client_steps == pytest.approx(wanted)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[TimedExchange]:
    """What the measured rounds recorded, once they have ended."""
    noted: list[TimedExchange] = []
    close = ShortRoundEngine.close
    monkeypatch.setattr(ShortRoundEngine, "close", lambda self: (noted.extend(self.timed), close(self))[1])
    return noted


def test_a_long_training_is_cut_and_counted_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timed: list[TimedExchange]
) -> None:
    monkeypatch.setattr("holdfast.forecast.measure.shares", lambda expected, longest: (0.1, 0.25))
    given = table(
        method="local",
        data={"partition": {"name": "iid", "samples_per_client": 20}, "split": {"train": 0.5, "test": 0.5}},
        train={"local_epochs": 20, "rounds": 3},
    )
    found = holdfast.plan(given, out=tmp_path / "run")
    assert found.client_steps == 5 * 2 * 20 * 3
    trained = {span.round: span.work.steps for span in timed if span.task == "train"}
    assert trained[1] == trained[3] == 5 * 10 and trained[2] == 5 * 4
    assert timed[0].work.more_on_host > 0


def test_orders_of_batches_are_in_memory_one_training_after_the_other() -> None:
    """Steps of all trainings of an exchange add up; what the batches of one take is given back before the
    next."""
    discard_state = ShortRoundEngine({})
    for work in (TrainingWork(10, 12, 40, 48, 700.0, 30.0), TrainingWork(5, 6, 20, 24, 900.0, 20.0)):
        discard_state._note(work)
    assert TrainingWork(*discard_state._noted) == TrainingWork(15, 18, 60, 72, 900.0, 30.0)


def test_the_part_of_a_final_tuning_that_was_cut_off_is_forecast() -> None:
    """By hand: 2 seconds a round and 0.1 a row. Rounds were cut to 10 or 30 of 100 rows, the tuning at the
    end to 20 of 200."""
    cell = SimpleNamespace(group=lambda task: (task,))
    seconds = {1: 4.0, 2: 3.0, 3: 5.0, 4: 3.0, 5: 5.0, 6: 4.0}  # 10 or 30 rows; the last is the tuning
    rows = {1: 20, 2: 10, 3: 30, 4: 10, 5: 30, 6: 20}
    full = {**dict.fromkeys(range(1, 6), 100), 6: 200}
    timed = [
        TimedExchange(
            r, "train", False, ("train",), seconds[r], TrainingWork(rows[r], rows[r], full[r], full[r])
        )
        for r in seconds
    ]
    began = {r: 10.0 * r for r in range(1, 7)}
    experiment: Any = SimpleNamespace(run_context=cell)
    expected_participation: Any = SimpleNamespace(
        steps=np.full(8, 100.0)
    )  # as many in each of the eight rounds of the run
    whole, (kind,) = forecast_seconds(
        MeasuredRounds([experiment], [8], [1], 5, timed, began, 0.0, 70.0, [expected_participation], [], 1)
    )
    assert kind.steps == 8 * 100 + 200
    assert whole.training == kind.seconds == pytest.approx(8 * (2.0 + 0.1 * 100) + 4.0 + 0.1 * (200 - 20))


def test_clients_tuned_at_evaluation_cost_evaluation(tmp_path: Path, timed: list[TimedExchange]) -> None:
    given = table(
        method="fedavg-ft", train={"participation": 0.4, "rounds": 4}, evaluate={"unselected": "finetune"}
    )
    found = holdfast.plan(given, out=tmp_path / "run")
    plain = holdfast.plan({**given, "evaluate": {"unselected": "keep_own"}}, out=tmp_path / "run")
    assert found.client_steps == plain.client_steps, "the run's own steps are counted without it"
    tuned = [span.work.steps_in_full for span in timed if span.evaluation and span.round == 3]
    assert tuned == [3 * 4, 0], "three of five clients, 18 samples each"


def test_worker_processes_record_their_work(tmp_path: Path) -> None:
    given = table(
        method="ditto",
        train={"local_steps": 2, "rounds": 5},
        engine={"plan": "loop", "workers": 2, "threads": None},
    )
    found = holdfast.plan(given, out=tmp_path / "run")
    (group,) = found.groups
    assert (group.workers, group.threads, group.stack, group.client_steps) == (2, 1, 1, 5 * 2 * 2 * 5)
    assert (
        found.memory.host
        > 2
        * holdfast.plan({**given, "engine": {"plan": "loop", "threads": 1}}, out=tmp_path / "run").memory.host
    )


def test_rows_that_a_device_computes() -> None:
    steps = np.array([1, 4, 2, 2])
    assert computed_rows(steps, Plan("vmap")) == computed_rows(steps, Plan("captured-loop")) == 9
    assert computed_rows(steps, Plan("captured-vmap")) == 4 * 4
    assert computed_rows(steps, Plan("captured-vmap", sizes=(2, 4))) == 4 + 4 + 2 + 2, (
        "one of them goes on in a program of two"
    )
    assert computed_rows(steps, Plan("captured-vmap", rows=2, sizes=(2,))) == 2 * 4 + 2 * 2
    assert computed_rows(np.zeros(0, dtype=np.int64), Plan("captured-vmap")) == 0


# ---- seconds


def test_a_line_through_short_and_long_rounds() -> None:
    assert line([(10, 3.0), (30, 7.0), (10, 3.0), (30, 7.0), (30, 99.0)]) == pytest.approx((1.0, 0.2))
    assert line([(10, 3.0), (30, 2.0)]) == pytest.approx((0.0, 2.0 / 30)), (
        "a slope that noise has turned round is none"
    )
    assert line([(10, 1.0), (30, 7.0)]) == pytest.approx((0.0, 7.0 / 30)), "nothing takes less than no time"
    assert line([(0, 2.0), (0, 4.0)]) == (3.0, 0.0) and line([]) == (0.0, 0.0)
    assert [evaluations(rounds, 3) for rounds in (1, 3, 4)] == [1, 1, 2]
    assert (
        shares(0.5, 1.0) == pytest.approx((0.3, 1.0))
        and shares(4.0, 1.0) == pytest.approx((0.075, 0.25))
        and shares(0.0, 1.0)[1] == 1.0
    )


def test_the_parts_add_up(tmp_path: Path) -> None:
    seconds = holdfast.plan(table(), out=tmp_path / "run").seconds
    assert min(seconds.start, seconds.training, seconds.evaluation, seconds.server) > 0
    assert seconds.total == pytest.approx(
        seconds.start + seconds.training + seconds.evaluation + seconds.server
    )


def test_a_run_without_training_has_a_forecast(tmp_path: Path) -> None:
    found = holdfast.plan(table(train={"local_epochs": 0}), out=tmp_path / "run")
    assert found.client_steps == 0 and found.groups[0].microseconds is None


# ---- disk


@pytest.mark.parametrize(
    "given",
    [
        table(method="ditto", train={"rounds": 30, "participation": 0.4}, data={"clients": 12}),
        table(method="fedavg", train={"rounds": 25}, evaluate={"every": 4}),
        table(method={"name": "local", "everyone": True}, train={"rounds": 8, "participation": 0.4}),
        table(
            train={"rounds": 6},
            sweep={"method.name": ["fedavg", "ditto"], "seed": [0, 1], "train.rounds": [6, 9]},
        ),
    ],
    ids=["drawn", "sometimes", "everyone", "sweep"],
)
def test_forecast_bytes_on_disk_equal_those_of_the_run(tmp_path: Path, given: dict[str, Any]) -> None:
    disk = holdfast.plan(given, out=tmp_path / "planned").disk
    (holdfast.sweep if "sweep" in given else holdfast.run)(given, out=tmp_path / "real")
    size, files = bytes_in(tmp_path / "real")
    assert disk.total == pytest.approx(size, rel=0.03) and disk.files == files
    assert disk.total == pytest.approx(disk.once + disk.rounds + disk.private, abs=2)


def test_private_rows_are_forecast_exactly(tmp_path: Path) -> None:
    given = table(
        method="ditto", train={"rounds": 11, "participation": 0.3, "availability": 0.8}, data={"clients": 14}
    )
    run = holdfast.run(given, out=tmp_path / "run")
    head = run.store.head()
    assert head is not None
    expected = expected_participation(Experiment(make_config(given), tmp_path / "other"), 11)
    assert len(head[1]["rows/index"]) == expected.live[-1]
    per_record = 8 * run._experiment.network.layout.size
    assert (tmp_path / "run/rows/records").stat().st_size == per_record * expected.records[-1]


# ---- nothing is left, whatever happens


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, Interrupted, SystemExit])
def test_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    exchange, count = ShortRoundEngine.exchange, 0

    def fall(self: ShortRoundEngine, calls: Any) -> Any:
        nonlocal count
        count += 1
        assert list(tmp_path.glob(".forecast-*/run/head.json")), "it runs beside the run's own folder"
        if count == 3:
            raise error
        return exchange(self, calls)

    monkeypatch.setattr(ShortRoundEngine, "exchange", fall)
    with pytest.raises(error):
        holdfast.plan(table(), out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == [] and count == 3


def test_a_cell_that_would_fail_is_named(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match=f"'{FallsMethod.name}' would fail in round 1: .*the server fell"):
        holdfast.plan(table(sweep={"method.name": ["fedavg", FallsMethod.name]}), out=tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        holdfast.plan(table(method=FallsMethod.name), out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


# ---- the command


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def go(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["plan", *args])
        streams = capsys.readouterr()
        return int(end.value.code or 0), streams.out, streams.err

    return go


CONFIG = """
data = { clients = 4 }
train = { rounds = 3, local_epochs = 1 }
engine = { plan = "vmap", threads = 1 }
[sweep]
"method.name" = ["fedavg", "ditto"]
seed = [0, 1]
"""


def test_the_forecast_as_json(call: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "table.toml").write_text(CONFIG)
    code, out, _ = call("table.toml", "--json", "--shard", "1/2", "--set", "train.rounds=5")
    found = json.loads(out)
    assert code == 0 and list(found) == [
        "device",
        "cells",
        "groups",
        "client_steps",
        "seconds",
        "memory",
        "disk",
    ]
    assert found["device"] == "cpu" and found["cells"] == ["fedavg seed=0", "fedavg seed=1"]
    assert list(found["seconds"]) == ["start", "training", "evaluation", "server", "total"]
    assert list(found["disk"]) == ["total", "once", "rounds", "private", "files"]
    assert found["memory"]["host"] > 50e6 and found["memory"]["device"] is None
    assert set(found["groups"][0]) == {
        "cells",
        "plan",
        "precision",
        "rows",
        "stack",
        "workers",
        "threads",
        "client_steps",
        "microseconds",
    }
    assert [file.name for file in tmp_path.iterdir()] == ["table.toml"]


def test_the_forecast_as_a_table(call: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "table.toml").write_text(CONFIG)
    code, out, _ = call("table.toml")
    assert code == 0
    for words in (
        "fedavg seed=0 ... fedavg seed=1",
        "ditto seed=0",
        "trained as 2 groups on cpu",
        "memory",
        "disk",
        "private rows",
    ):
        assert words in out
    said: list[str] = []
    cell = ("", make_config({"method": "ditto", "train": {"rounds": 2}}))
    forecast_cost([cell], tmp_path / "x", RunCallbacks(say=said.append))
    assert any(line.startswith("plan ") for line in said)
    assert not any("expect" in line for line in said)  # the table is the only forecast
    code, out, _ = call("--set", "method.name=ditto", "--set", "train.rounds=2", "--plan", "loop")
    assert code == 0 and "ditto" in out and "1 group on cpu" in out


def test_ctrl_c_leaves_no_files(
    call: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ShortRoundEngine, "exchange", stop)
    code, out, err = call("--set", "train.rounds=2")
    assert code == 130 and not out and "no files were left behind" in err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--set", "train.lrr=1"], "unknown key 'train.lrr'; did you mean 'lr'?"),
        (["missing.toml"], "config file not found: missing.toml"),
        (["--shard", "3/2"], "--shard 3/2: write I/N"),
        (["--device", "tpu"], "engine.device"),
        (["--set", "data.name=nothing"], "nothing"),
    ],
)
def test_mistakes_are_reported_as_by_run(
    call: Callable[..., tuple[int, str, str]], args: list[str], message: str
) -> None:
    code, out, err = call(*args)
    assert code == 2 and not out and err.startswith("error: ") and message in err and err.count("\n") == 1


# ---- against what happens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp-sweep", "cnn-ditto"])
def test_the_forecast_is_close_to_the_run(tmp_path: Path, name: str) -> None:
    """Memory within 20 %, time within a factor of 2; the best of three attempts for time, because others use
    the machine too."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
    }
    command = [
        sys.executable,
        str(REPOSITORY / "benchmarks" / "forecasts.py"),
        "cpu",
        "--only",
        name,
        "--json",
    ]
    for _ in range(3):
        done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True)
        (found,) = json.loads(done.stdout)
        ratios = found["ratios"]
        assert 0.8 < ratios["memory"] < 1.2 and 0.97 < ratios["disk"] < 1.03, found
        if 0.5 < ratios["seconds"] < 2:
            return
    pytest.fail(f"seconds: {found}")
