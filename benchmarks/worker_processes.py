"""Do worker processes pay? One round's training of the bench's works, in one process with one thread, in one
with all threads, and in as many processes as cores with one thread each.

    python benchmarks/worker_processes.py
    python benchmarks/worker_processes.py --turns 20 --json

The ways take turns and the best turn counts. What is timed is the exchange itself: what a cohort is sent, its
training, private rows to the disk (ditto), and its answers."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from holdfast.bench.steps import WORKS, Work, find_works
from holdfast.core.types import broadcast
from holdfast.engine.simulator import Call, Simulator
from holdfast.engine.workers import usable_cores
from holdfast.experiment.config import make_config, parse_memory
from holdfast.experiment.loop import Experiment
from holdfast.experiment.planner import plan_together, sentence
from holdfast.local.plan import Plan, bounded, bytes_per_row, on_threads


def experiment_of(work: Work, method: str, folder: Path) -> Experiment:
    """On synthetic samples of the work's shape: where they lie in memory is all that matters."""
    options = {"shape": [1, 8, 8], **work.source, "samples": work.clients * work.samples}
    options["shape"] = list(options["shape"])
    del options["name"]
    return Experiment(
        make_config(
            {
                "method": method,
                "model": work.model,
                "data": {
                    "name": "synthetic",
                    "options": options,
                    "clients": work.clients,
                    "split": {"train": 1.0, "test": 0.0},
                    "partition": {"name": "iid", "samples_per_client": work.samples},
                },
                "train": {
                    "local_epochs": work.epochs,
                    "batch_size": work.batch_size,
                    "lr": work.lr,
                    "rounds": 1000,
                },
            }
        ),
        folder,
    )


def measure(work: Work, method: str, turns: int) -> dict[str, Any]:
    cores = usable_cores()
    with tempfile.TemporaryDirectory() as folder:
        experiment = experiment_of(work, method, Path(folder))
        experiment.store.open()
        cell, memory = experiment.run_context, parse_memory("2GB")
        cell.round = 1
        sample = cell.federation.samples.batch(torch.zeros(1, dtype=torch.int64))[0]
        per_row = bytes_per_row(cell.network, sample, work.batch_size)
        ways = {}
        for name in ("loop", "vmap"):
            for threads, workers in ((1, 1), (torch.get_num_threads(), 1), (1, cores)):
                plan = bounded(Plan(name, workers=workers), memory // workers, per_row)
                ways[f"{name} {workers}x{threads}"] = threads, Simulator({cell.plan_key: plan})
        call = Call(
            cell, broadcast("train", cell.wire().pack(cell.initial), experiment.participation.clients)
        )
        best = dict.fromkeys(ways, float("inf"))
        for turn in range(turns + 1):
            for name, (threads, simulator) in ways.items():
                with on_threads(threads):
                    began = time.perf_counter()
                    simulator.exchange([call])
                    if turn:  # the first warms up, and forks the workers
                        best[name] = min(best[name], time.perf_counter() - began)
        for _, simulator in ways.values():
            simulator.close()
        experiment.store.close()
        began = time.perf_counter()
        threads, forecasts = plan_together([experiment], torch.device("cpu"), None)
        chosen = [sentence(forecast, [experiment], threads) for forecast in forecasts.values()][0]
    return {
        "work": work.name,
        "method": method,
        "seconds": best,
        "auto": chosen,
        "choosing_seconds": time.perf_counter() - began,
    }


def line(row: dict[str, Any]) -> str:
    return (
        f"| {row['work']} | {row['method']} | "
        + " | ".join(f"{s * 1e3:.1f}" for s in row["seconds"].values())
        + f" | {row['auto']} |"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--works", nargs="+", default=[work.name for work in WORKS[:3]])
    parser.add_argument("--methods", nargs="+", default=["fedavg", "ditto"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    given = parser.parse_args()
    rows = []
    for work in find_works(given.works):
        for method in given.methods:
            rows.append(measure(work, method, given.turns))
            if not given.json:
                if len(rows) == 1:
                    names = [*rows[0]["seconds"], "auto takes"]
                    print(
                        "milliseconds of one exchange\n| work | method | "
                        + " | ".join(names)
                        + " |\n|"
                        + "---|" * (len(names) + 2)
                    )
                print(line(rows[-1]), flush=True)
    if given.json:
        print(
            json.dumps(
                {
                    "rows": rows,
                    "torch": torch.__version__,
                    "cores": usable_cores(),
                    "load": os.getloadavg()[0],
                },
                indent=1,
            )
        )
