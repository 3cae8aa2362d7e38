"""Memory is bounded by `engine.memory`, not by the number of clients; 10,000 of them fit into 2 GB."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.errors import HoldfastError
from holdfast.engine.simulator import Simulator
from holdfast.results.run import Run
from tests.experiment.memory_case import run_case

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("plan", ["loop", "vmap"])
def test_less_memory_means_smaller_stacks_and_the_same_results(tmp_path: Path, plan: str) -> None:
    runs = {memory: run_case(tmp_path / memory, memory, plan) for memory in ("1GB", "300KB", "1KB")}
    rows = [run.manifest["plan"]["rows"] for run in runs.values()]
    assert rows[0] == 1024 and 1 < rows[1] < 7 and rows[2] == 1
    for run in runs.values():
        for client in (None, 0, 6):
            torch.testing.assert_close(run.vector(client), runs["1GB"].vector(client), rtol=0, atol=1e-10)
        assert run.final["accuracy"] == pytest.approx(runs["1GB"].final["accuracy"], abs=1e-12)


def test_what_a_large_cohort_sends_is_kept_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as in memory, and nothing left behind."""
    mapped = []
    original = torch.from_file
    monkeypatch.setattr(
        torch, "from_file", lambda *args, **kwargs: mapped.append(kwargs["size"]) or original(*args, **kwargs)
    )
    small = run_case(tmp_path / "file", "4KB", "loop", "float32")
    assert mapped, "7 clients x 610 parameters do not fit into 4 kB"
    mapped.clear()
    large = run_case(tmp_path / "memory", "1GB", "loop", "float32")
    assert not mapped
    for client in (None, *range(7)):
        assert torch.equal(small.vector(client), large.vector(client))
    assert sorted(file.name for file in (tmp_path / "file" / "rows").iterdir()) == ["fields.json", "records"]


def test_no_room_for_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(HoldfastError, match="the disk is full"):
            run_case(tmp_path / "run", "4KB")
    assert Run(tmp_path / "run").round == 0 and not list((tmp_path / "run").rglob(".*"))


def test_replies_do_not_keep_a_stack_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of one row would hold on to the models of its whole chunk, and so of the whole cohort."""
    answers = []
    exchange = Simulator.exchange
    monkeypatch.setattr(
        Simulator, "exchange", lambda self, calls: answers.append(exchange(self, calls)[0]) or [answers[-1]]
    )
    run_case(tmp_path / "run", "300KB")
    for up in answers:
        for name, value in up.fields.items():
            assert value.untyped_storage().nbytes() <= max(value.numel() * value.element_size(), 16), name


ANONYMOUS = """
import sys, threading, time
from pathlib import Path
import torch
from tests.experiment.memory_case import run_case
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) / 1024
clients, memory, method = int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
run_case(Path(sys.argv[1]) / "warm", "1GB", dtype="float32")
before = peak = resident()
def watch():
    global peak
    while True:
        peak = max(peak, resident())
        time.sleep(0.001)
threading.Thread(target=watch, daemon=True).start()
run_case(
    Path(sys.argv[1]) / "run", memory, dtype="float32", method=method, model={"name": "mlp", "hidden": 100},
    data={"name": "synthetic", "options": {"samples": 4 * clients}, "clients": clients, "partition": {"name": "iid"}},
    train={"rounds": 2, "local_steps": 1, "batch_size": 5}, evaluate={"clients": "cohort"},
)
print(peak - before)
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ditto", "fedavg"])
def test_memory_does_not_grow_with_the_cohort(tmp_path: Path, method: str) -> None:
    """Four times the clients, 80,000 parameters each: 50 MB and 200 MB of updates under a bound of 40 MB."""
    peaks = {}
    for clients in (150, 600):
        command = [
            sys.executable,
            "-c",
            ANONYMOUS,
            str(tmp_path / str(clients)),
            str(clients),
            "40MB",
            method,
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        peaks[clients] = float(done.stdout)
    print(method, peaks)
    assert peaks[600] < 100 and peaks[600] < peaks[150] + 40, peaks


@pytest.mark.slow
def test_ten_thousand_clients_fit_into_two_gigabytes(tmp_path: Path) -> None:
    """MNIST-sized data, 50 clients drawn in each of 200 rounds, Ditto's private models of 86,910
    parameters."""
    command = [sys.executable, "benchmarks/many_clients.py", "--threads", "1", "--out", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    print(figures)
    assert figures["parameters"] == 86_910 and figures["rounds"] == 200
    assert figures["peak_mb"] < 2000
    row = 86_910 * 4
    assert (tmp_path / "run" / "rows" / "records").stat().st_size <= 10_000 * row, "no client has two rows"
