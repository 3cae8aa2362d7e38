"""Measures what it costs and what it saves to use several processes or machines.

    python benchmarks/machines.py ray                      # about ten minutes on two quiet cores
    python benchmarks/machines.py ray --turns 1 --seconds 5 --units 2 6    # less, to try it

Part `ray`: sweeps of small models on the embedded digits, in this process, in one process per device
(`--devices`), and on a Ray cluster that is started on this machine (`--ray`). All use plan `loop` and one
thread for each process. The ways take turns, so that other work on the machine meets all of them.

* Overhead: sweeps of so many units of one short round each, on one device. The slope over the number of units
  is the time of a unit, the rest the time to start. What a unit takes beyond its time in this process is the
  overhead of handing it out. Ray's workers keep their process from one sweep to the next, so that of Ray
  starts once.
* Speed-up: a sweep that takes about a minute in this process, on one process and on two.

Ray's workers have a low priority by default; here they have that of this process (RAY_worker_niceness=0), so
that other work on the machine slows all ways alike. Prints Markdown tables: the median over the turns, and
the range."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

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


PARTS = {"ray": ray_part}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=list(PARTS), help="what to measure")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60, help="length of the job, in one process")
    parser.add_argument("--units", type=int, nargs=2, default=[4, 24], help="numbers of units")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for part in given.parts:
        PARTS[part](given)


if __name__ == "__main__":
    main()
