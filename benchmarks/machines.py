"""Measures what it costs and what it saves to use several processes or machines.

    python benchmarks/machines.py ray                      # about ten minutes on two quiet cores
    python benchmarks/machines.py ray --turns 1 --seconds 5 --units 2 6    # less, to try it
    python benchmarks/machines.py ranks                    # about fifteen minutes

Part `ray`: sweeps of small models on the embedded digits, in this process, in one process per device
(`--devices`), and on a Ray cluster that is started on this machine (`--ray`). All use plan `loop` and one
thread for each process. The ways take turns, so that other work on the machine meets all of them.

* Overhead: sweeps of so many units of one short round each, on one device. The slope over the number of units
  is the time of a unit, the rest the time to start. What a unit takes beyond its time in this process is the
  overhead of handing it out. Ray's workers keep their process from one sweep to the next, so that of Ray
  starts once.
* Speed-up: a sweep that takes about a minute in this process, on one process and on two.

Ray's workers have a low priority by default; here they have that of this process (RAY_worker_niceness=0), so
that other work on the machine slows all ways alike.

Part `ranks`: one experiment on one process, on one rank and on two ranks (`holdfast run --devices cpu,cpu`),
of one thread each. A run is started as a user starts it; seconds of a round are those between the commits of
its rounds.

* Overhead: a round that trains next to nothing, under `mean`, `median`, `krum` and `fedcpa`, which stand for
  the four ways in which a rule reads what ranks share.
* Speed-up: a small CNN with BatchNorm on 20 clients with 10 epochs each under `median`, a job of about a
  minute on one process.

Prints Markdown tables: the median over the turns, and the range."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from holdfast.engine.workers import usable_cores
from holdfast.experiment.config import Config, make_config
from holdfast.sweeps.launch import OnDevices
from holdfast.sweeps.launch_ray import OnRay
from holdfast.sweeps.ray_executor import LOCAL, connected
from holdfast.sweeps.runner import Launcher, results_of, sweep

Cells = list[tuple[str, Config]]
Ways = Mapping[str, Callable[[], Launcher | None]]


def cells_of(count: int, rounds: int, method: str = "fedavg") -> Cells:
    """Cells of as many stacks: the batch size is part of the key by which cells are trained together."""
    config: dict[str, Any] = {
        "method": method,
        "model": {"name": "mlp", "hidden": 32},
        "data": {"clients": 10, "partition": {"name": "pathological", "samples_per_client": 40}},
        "engine": {"plan": "loop", "threads": 1, "workers": 1},
    }
    train = {"rounds": rounds, "local_epochs": 1, "lr": 0.1}
    return [
        (f"batch {size}", make_config({**config, "train": {**train, "batch_size": size}}))
        for size in range(5, 5 + count)
    ]


def seconds_of(cells: Cells, launcher: Launcher | None) -> float:
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        results_of(sweep(cells, Path(folder) / "sweep", launcher=launcher))
        return time.perf_counter() - began


def in_turns(ways: Ways, sizes: Mapping[str, Cells], turns: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of every way with every sweep; a first turn that is not counted fills caches."""
    seen: dict[tuple[str, str], list[float]] = {(way, size): [] for way in ways for size in sizes}
    for turn in range(turns + 1):
        for size, cells in sizes.items():
            for way, launcher in ways.items():
                taken = seconds_of(cells[:1] if turn == 0 else cells, launcher())
                if turn:
                    seen[way, size].append(taken)
    return seen


def spread(values: list[float], digits: int = 2) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def overhead(given: argparse.Namespace) -> None:
    """What a unit costs, beside the same in this process."""
    ways: Ways = {
        "this process": lambda: None,
        "one process (`--devices cpu`)": lambda: OnDevices("cpu"),
        "Ray, one CPU": lambda: OnRay(LOCAL),
    }
    few, many = given.units
    sizes = {str(count): cells_of(count, rounds=1) for count in (few, many)}
    with connected(LOCAL, cpus=1):  # its start is not part of what is measured
        seen = in_turns(ways, sizes, given.turns)
    print("| way | s to start | s of a unit |\n|---|---:|---:|")
    for way in ways:
        pairs = list(zip(seen[way, str(few)], seen[way, str(many)], strict=True))
        slopes = [(more - less) / (many - few) for less, more in pairs]
        starts = [less - few * slope for (less, _), slope in zip(pairs, slopes, strict=True)]
        print(f"| {way} | {spread(starts)} | {spread(slopes, 3)} |", flush=True)


def speed_up(given: argparse.Namespace) -> None:
    """A sweep of about so many seconds, on one process and on two."""
    taken = min(seconds_of(cells_of(4, rounds=20, method="ditto"), None) for _ in range(2))
    cells = cells_of(4, rounds=max(1, round(20 * given.seconds / taken)), method="ditto")
    ways: Ways = {
        "this process": lambda: None,
        "two processes (`--devices cpu:2`)": lambda: OnDevices("cpu:2"),
        "Ray, two CPUs": lambda: OnRay(LOCAL),
    }
    with connected(LOCAL, cpus=2):
        seen = in_turns(ways, {"job": cells}, given.turns)
    alone = seen["this process", "job"]
    print("\n| way | s | times as fast |\n|---|---:|---:|")
    for way in ways:
        values = seen[way, "job"]
        gains = [before / after for before, after in zip(alone, values, strict=True)]
        print(f"| {way} | {spread(values, 1)} | {spread(gains)} |", flush=True)


def ray_part(given: argparse.Namespace) -> None:
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    print(f"Ray {ray.__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}\n")
    overhead(given)
    speed_up(given)


# ---- one experiment on several ranks

ALONE, ONE_RANK, TWO_RANKS = "one process", "one rank", "two ranks (`--devices cpu,cpu`)"
READS = {"mean": "sum", "median": "columns", "krum": "gram", "fedcpa": "rows"}


def seconds_of_a_round(way: str, settings: Mapping[str, Any]) -> float:
    """The mean between the commits of the first and the last round of a run that is started as a user starts
    it."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--set={name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-m", "holdfast", "run", "--out", f"{folder}/run", *words]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        if way == ONE_RANK:
            env |= {"HOLDFAST_RANKS": "1", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        command += ["--devices", "cpu,cpu"] if way == TWO_RANKS else []
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
        times = sorted(file.stat().st_mtime for file in Path(folder, "run/parts").glob("*[1-9]*.json"))
        return (times[-1] - times[0]) / (len(times) - 1)


def rounds_in_turns(
    ways: Sequence[str], settings: Mapping[str, Any], rounds: int, turns: int
) -> dict[str, list[float]]:
    """Seconds of a round of each way, by turns."""
    seen: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(turns):
        for way in ways:
            seen[way].append(seconds_of_a_round(way, {**settings, "train.rounds": rounds}))
    return seen


def ranks_part(given: argparse.Namespace) -> None:
    print(f"PyTorch {torch.__version__}, Python {platform.python_version()}, {usable_cores()} cores\n")
    ways = (ALONE, ONE_RANK, TWO_RANKS)
    common = {"engine.plan": "loop", "engine.threads": 1, "engine.workers": 1, "method.name": "fedavg"}
    small = {**common, "model.name": "mlp", "data.clients": 10, "train.local_epochs": 1, "aggregator.f": 1}
    print("| rule | it reads | " + " | ".join(f"{way}: ms of a round" for way in ways) + " |")
    print("|---|---|---:|---:|---:|")
    for rule, reads in READS.items():
        seen = rounds_in_turns(ways, {**small, "aggregator.name": rule}, given.rounds, given.turns)
        cells = [spread([1e3 * each for each in seen[way]], 1) for way in ways]
        print(f"| `{rule}` | `{reads}` | " + " | ".join(cells) + " |", flush=True)
    large = {**common, "model.name": "cnn-bn", "data.clients": 20, "aggregator.name": "median"}
    large |= {"train.local_epochs": 10, "evaluate.every": 10**6}
    rounds = 2 + max(2, round(given.seconds / seconds_of_a_round(ALONE, {**large, "train.rounds": 3})))
    seen = rounds_in_turns((ALONE, TWO_RANKS), large, rounds, given.turns)
    print(f"\n{rounds} rounds of the larger job:\n\n| way | s of a round | times as fast |\n|---|---:|---:|")
    for way, values in seen.items():
        gains = [before / after for before, after in zip(seen[ALONE], values, strict=True)]
        print(f"| {way} | {spread(values, 3)} | {spread(gains)} |", flush=True)


PARTS = {"ray": ray_part, "ranks": ranks_part}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=list(PARTS), help="what to measure")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60, help="length of the job, in one process")
    parser.add_argument("--units", type=int, nargs=2, default=[4, 24], help="numbers of units")
    parser.add_argument("--rounds", type=int, default=60, help="rounds of the small runs of ranks")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for part in given.parts:
        PARTS[part](given)


if __name__ == "__main__":
    main()
