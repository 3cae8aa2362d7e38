"""Measures all of a round but the training: a table of experiments with FedCAP's CIFAR-10 network whose
clients send noise instead. Prints the seconds of a round, by part:

    python benchmarks/host.py                              # 8 rules under 6 attacks, 20 clients, 6 rounds
    python benchmarks/host.py --threads 1 2 16             # with these numbers of host threads
    python benchmarks/host.py --device cuda --servers host device --turns 3    # where the servers compute

Cases are measured by turns, each in a process of its own; of several turns the median counts. On a GPU the
first round is left out: what is compiled and captured then is not repeated."""

from __future__ import annotations

import argparse
import json
import os
import statistics
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
from holdfast.experiment.runner import RunCallbacks
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
    "computed for servers": (lockstep, "answered"),
    "committed": (lockstep.Commits, "commit"),
    "commits waited for": (write_behind.WriteBehind, "done"),
}
WHOLE = "a whole round"


def noise(network: Any, model: Tensor, *_: Any, **__: Any) -> Fitted:
    """In the place of training."""
    rows, device = model.shape[0], model.device
    luck = torch.Generator(device).manual_seed(rows)
    moved = model + 0.01 * torch.randn(model.shape, generator=luck, device=device)
    losses = torch.zeros(rows, dtype=torch.float64, device=device)
    return Fitted(moved, losses, torch.ones(rows, dtype=torch.int64))


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


def cell(rule: str, attack: str, rounds: int, device: str = "cpu", server: str = "auto") -> Config:
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
            "engine": {
                "plan": "vmap",
                "threads": 1,
                "workers": 1,
                "memory": "20GB",
                "device": device,
                "server": server,
            },
        }
    )


def run_case(threads: int, rounds: int, device: str, server: str) -> None:
    """Measure one case, in its own process, because it leaves timers everywhere."""
    spent: Counter[str] = Counter()
    began: list[float] = []
    local_client.fit = noise  # type: ignore[assignment]
    if device == "cpu":
        runner._host_threads = lambda *_: threads  # type: ignore[assignment]
    simulator.give_back_memory = lambda: None  # as beside a GPU
    for part, (of, name) in PARTS.items():
        timed(part, of, name, spent)

    def moved(experiment: Any) -> None:
        if not began and experiment.run_context.round == 2:  # the first round is over
            began.append(time.perf_counter())
            spent.clear()

    with tempfile.TemporaryDirectory() as folder:
        cells = [
            (f"{rule} {attack}", cell(rule, attack, rounds + 1, device, server))
            for rule in RULES
            for attack in ATTACKS
        ]
        results_of(sweep(cells, Path(folder) / "sweep", RunCallbacks(moved=moved)))
        spent[WHOLE] = time.perf_counter() - began[0]
    print(json.dumps({part: spent[part] / rounds for part in (*PARTS, WHOLE)}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1], help="numbers of threads"
    )
    parser.add_argument("--rounds", type=int, default=6, help="rounds that are averaged over")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--servers", nargs="+", choices=("auto", "host", "device"), default=["auto"], help="engine.server"
    )
    parser.add_argument("--turns", type=int, default=1, help="of which the median counts")
    given = parser.parse_args()
    if given.measure:
        run_case(given.threads[0], given.rounds, given.device, given.servers[0])
        return
    print(
        f"seconds of a round of {len(RULES) * len(ATTACKS)} experiments on {given.device},"
        f" {os.cpu_count()} cores, PyTorch {torch.__version__}\n"
    )
    columns = (*PARTS, WHOLE)
    print("| threads | servers | " + " | ".join(columns) + " |\n|---:|---|" + "---:|" * len(columns))
    cases = [(threads, server) for threads in given.threads for server in given.servers]
    found: dict[tuple[int, str], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(given.turns):
        for case in cases:
            found[case].append(measured(*case, given.rounds, given.device))
    for (threads, server), turns in found.items():
        middle = (f"{statistics.median(turn[part] for turn in turns):.2f}" for part in columns)
        print(f"| {threads} | {server} | " + " | ".join(middle) + " |", flush=True)


def measured(threads: int, server: str, rounds: int, device: str) -> dict[str, float]:
    """One case, in a process of its own."""
    options = ["--threads", str(threads), "--servers", server, "--rounds", str(rounds), "--device", device]
    command = [sys.executable, __file__, *options, "--measure"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
