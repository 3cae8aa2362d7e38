"""Measures the host's share of a round on a GPU: a table of experiments with FedCAP's CIFAR-10 network whose
clients send noise instead of training. Prints the seconds of a round, by part, for several numbers of
threads:

    python benchmarks/host.py                    # 8 rules under 6 attacks, 20 clients, 6 rounds
    python benchmarks/host.py --threads 1 2 16     # with these numbers of threads


"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.engine import client_stack, lockstep, simulator
from holdfast.experiment import runner
from holdfast.experiment.config import Config, make_config
from holdfast.local import client as local_client
from holdfast.local.fit import Fitted
from holdfast.storage import write_behind
from holdfast.sweeps.runner import results_of, sweep

RULES = ("mean", "multi-krum", "median", "rfa", "trimmed-mean", "clustered", "fltrust", "fedcap")
ATTACKS = ("sign-flip", "replacement", "lie", "min-max", "min-sum", "ipm")
PARTS = {
    "private rows read": (simulator, "private_rows"),
    "stacks put together": (client_stack.ClientStack, "local"),
    "what clients send, read and dealt out": (simulator, "each"),
    "servers": (lockstep, "each"),
    "committed": (lockstep.Commits, "commit"),
    "commits waited for": (write_behind.WriteBehind, "done"),
}


def noise(network: Any, model: Tensor, *_: Any, **__: Any) -> Fitted:
    """In the place of training."""
    rows = model.shape[0]
    moved = model + 0.01 * torch.randn(model.shape, generator=torch.Generator().manual_seed(rows))
    return Fitted(moved, torch.zeros(rows, dtype=torch.float64), torch.ones(rows, dtype=torch.int64))


def timed(part: str, of: Any, name: str, spent: Counter[str]) -> None:
    """Count the main thread's seconds in a function."""
    work: Callable[..., Any] = getattr(of, name)

    @wraps(work)
    def watched(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return work(*args, **kwargs)
        finally:
            if threading.current_thread() is threading.main_thread():
                spent[part] += time.perf_counter() - began

    setattr(of, name, watched)


def cell(rule: str, attack: str, rounds: int) -> Config:
    aggregator = {"name": rule, "f": 0.3} if rule in ("multi-krum", "trimmed-mean") else rule
    method: dict[str, Any] = (
        {"method": "fedcap"} if rule == "fedcap" else {"method": "fedavg-ft", "aggregator": aggregator}
    )
    return make_config(
        method
        | {
            "attack": {"name": attack, "fraction": 0.3},
            "model": "fedcap-cnn",
            "data": {"name": "synthetic", "options": {"shape": [3, 32, 32]}, "clients": 20, "root": 100},
            "train": {"rounds": rounds},
            "evaluate": {"every": rounds},
            "engine": {"plan": "vmap", "threads": 1, "memory": "20GB"},
        }
    )


def run_case(threads: int, rounds: int) -> None:
    """Measure one case, in its own process, because it leaves timers everywhere."""
    spent: Counter[str] = Counter()
    local_client.fit = noise  # type: ignore[assignment]
    runner._host_threads = lambda *_: threads  # type: ignore[assignment]
    simulator.give_back_memory = lambda: None  # as beside a GPU
    for part, (of, name) in PARTS.items():
        timed(part, of, name, spent)
    with tempfile.TemporaryDirectory() as folder:
        cells = [(f"{rule} {attack}", cell(rule, attack, rounds)) for rule in RULES for attack in ATTACKS]
        results_of(sweep(cells, Path(folder) / "sweep"))
    print(" | ".join(f"{spent[part] / rounds:.2f}" for part in PARTS))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1], help="numbers of threads"
    )
    parser.add_argument("--rounds", type=int, default=6, help="rounds that are averaged over")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        run_case(given.threads[0], given.rounds)
        return
    print(
        f"seconds of a round of {len(RULES) * len(ATTACKS)} experiments, {os.cpu_count()} cores, PyTorch"
        f" {torch.__version__}\n"
    )
    print("| threads | " + " | ".join(PARTS) + " |\n|---:|" + "---:|" * len(PARTS))
    for threads in given.threads:
        options = ["--threads", str(threads), "--rounds", str(given.rounds), "--measure"]
        command = [sys.executable, __file__, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        print(f"| {threads} | {done.stdout.strip().splitlines()[-1]} |", flush=True)


if __name__ == "__main__":
    main()
