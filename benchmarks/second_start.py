"""How long until the first round begins: the first start on a dataset, which decodes it, and the second,
which finds it in the cache.

    HOLDFAST_DATA=... python benchmarks/second_start.py
    python benchmarks/second_start.py --data mnist --plan loop --turns 5 --json

Every start is a process of its own, and the clock starts when torch has been imported. The first start of
each plan has an empty cache; of the second starts the median counts."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CLIENTS = 20


def start_once(data: str, plan: str) -> dict[str, float]:
    """In a process of its own: seconds from the end of torch's import to each stage."""
    import torch  # noqa: F401

    begun = time.perf_counter()
    marks: dict[str, float] = {}

    def mark(name: str) -> None:
        marks[name] = time.perf_counter() - begun

    from holdfast.data import federation
    from holdfast.experiment.config import make_config
    from holdfast.experiment.runner import RunCallbacks
    from holdfast.sweeps.session import start

    mark("imported")
    config = make_config(
        {
            "method": "fedavg",
            "model": "fedcap-cnn",
            "data": {"name": data, "clients": CLIENTS},
            "train": {"rounds": 1, "local_steps": 1},
            "engine": {"plan": plan},
        }
    )
    load = federation.load_samples

    def loaded(*args: Any) -> Any:
        samples = load(*args)
        mark("data")
        return samples

    federation.load_samples = loaded  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        start([("", config)], Path(folder) / "run", RunCallbacks(planned=lambda _: mark("first round")))
    mark("played")
    return marks


def in_a_process(data: str, plan: str, cache: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--once", "--data", data, "--plan", plan]
    done = subprocess.run(
        command, env={**os.environ, "HOLDFAST_CACHE": cache}, stdout=subprocess.PIPE, text=True, check=True
    )
    marks: dict[str, float] = json.loads(done.stdout)
    return marks


def measure(data: str, plans: list[str], turns: int) -> list[dict[str, Any]]:
    rows = []
    for plan in plans:
        with tempfile.TemporaryDirectory() as cache:
            first = in_a_process(data, plan, cache)
            again = [in_a_process(data, plan, cache) for _ in range(turns)]
        middle = {stage: statistics.median(marks[stage] for marks in again) for stage in first}
        rows += [{"plan": plan, "start": "first", **first}, {"plan": plan, "start": "second", **middle}]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--plan", nargs="+", default=["loop", "auto"])
    parser.add_argument("--turns", type=int, default=3, help="second starts of each plan")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.once:
        print(json.dumps(start_once(chosen.data, chosen.plan[0])))
        return
    rows = measure(chosen.data, chosen.plan, chosen.turns)
    if chosen.json:
        print(json.dumps(rows, indent=1))
        return
    stages = [key for key in rows[0] if key not in ("plan", "start")]
    print(f"{chosen.data}, {CLIENTS} clients, fedcap-cnn, fedavg: seconds after torch is imported until")
    print(f"{'plan':8}{'start':8}" + "".join(f"{stage:>13}" for stage in stages))
    for row in rows:
        print(f"{row['plan']:8}{row['start']:8}" + "".join(f"{row[stage]:13.2f}" for stage in stages))


if __name__ == "__main__":
    main()
