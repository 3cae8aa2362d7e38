"""Measures what it saves to commit a round while the next one trains: sweeps of small models on the embedded
digits, whose rounds are short beside the disk, with and without.

    python benchmarks/write_behind.py                          # 6 and 48 cells, 5 turns of 30 rounds each
    python benchmarks/write_behind.py --cells 48 --hidden 512    # with a larger model
    python benchmarks/write_behind.py --out /mnt/nfs             # on another disk

Both ways take turns in one process. Prints the seconds of a round, from commit to commit: the median over all
rounds but the first two of a sweep, and between which values nine of ten are."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from holdfast.engine.simulator import Simulator
from holdfast.experiment.config import Config, make_config
from holdfast.experiment.runner import RunCallbacks
from holdfast.sweeps.runner import results_of, sweep

WAYS = {"commit, then train": False, "commit while training": True}


def configs(count: int, method: str, hidden: int, rounds: int) -> list[tuple[str, Config]]:
    config = {
        "method": method,
        "model": {"name": "mlp", "hidden": hidden},
        "data": {"clients": 10, "partition": {"name": "pathological", "samples_per_client": 40}},
        "train": {"rounds": rounds, "local_epochs": 1, "batch_size": 10, "lr": 0.1},
        "engine": {"plan": "vmap", "threads": 1},
    }
    return [(f"seed {seed}", make_config({**config, "seed": seed})) for seed in range(count)]


def seconds_of_rounds(cells: list[tuple[str, Config]], folder: Path) -> list[float]:
    """From commit to commit, as the first cell sees them."""
    began: dict[int, float] = {}

    def moved(experiment: Any) -> None:
        if experiment.label == cells[0][0]:
            began.setdefault(experiment.run_context.round, time.perf_counter())

    results_of(sweep(cells, folder, RunCallbacks(moved=moved)))
    moments = [began[round] for round in sorted(began)][2:]
    return [after - before for before, after in zip(moments, moments[1:], strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, nargs="+", default=[6, 48], help="numbers of experiments")
    parser.add_argument("--method", default="ditto")
    parser.add_argument("--hidden", type=int, default=32, help="units of the model's hidden layer")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where to write; a temporary folder by default")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| cells | way | ms a round | nine of ten |\n|---:|---|---:|---:|")
    for count in given.cells:
        cells = configs(count, given.method, given.hidden, given.rounds)
        seen: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(given.turns):
            for way, behind in WAYS.items():
                Simulator.writes_behind = behind
                with tempfile.TemporaryDirectory(dir=given.out) as folder:
                    seen[way] += seconds_of_rounds(cells, Path(folder) / "sweep")
        for way, taken in seen.items():
            cuts = statistics.quantiles(taken, n=20)
            low, middle, high = (1000 * value for value in (cuts[0], statistics.median(taken), cuts[-1]))
            print(f"| {count} | {way} | {middle:.1f} | {low:.1f} to {high:.1f} |", flush=True)


if __name__ == "__main__":
    main()
