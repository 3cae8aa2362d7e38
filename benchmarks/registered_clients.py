"""Does a round cost more when more clients are registered? 50 drawn of 100, 1,000 and 10,000, with the same
samples each.

    python benchmarks/registered_clients.py
    python benchmarks/registered_clients.py --rounds 60 --turns 5 --json

The federations take turns, so that a busy machine slows all of them alike. A turn is a run of its own;
seconds per round are by the wall clock from the end of the first few rounds to the end of the last, so
start-up does not count. The best turn of each counts."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.experiment.config import Config, make_config
from holdfast.experiment.loop import Experiment
from holdfast.experiment.runner import RunCallbacks
from holdfast.sweeps.session import start

WARM = 5  # rounds before the clock starts


def config_of(method: str, clients: int, cohort: int, rounds: int, plan: str) -> Config:
    """Ten samples of 1x8x8 a client, the digits' network of 64 hidden units, 4,810 parameters; 5 epochs, the
    default."""
    return make_config(
        {
            "method": method,
            "model": {"name": "mlp", "hidden": 64},
            "data": {
                "name": "synthetic",
                "options": {"shape": [1, 8, 8], "samples": 10 * clients, "classes": 10},
                "clients": clients,
                "partition": {"name": "iid", "samples_per_client": 10},
            },
            "train": {"rounds": rounds, "participation": cohort / clients, "batch_size": 10},
            "evaluate": {"clients": "cohort"},
            "engine": {"plan": plan, "threads": 1, "workers": 1},
        }
    )


def seconds_per_round(config: Config) -> float:
    """By the wall clock, all of a round: drawing, training, evaluation, commit."""
    ends: dict[int, float] = {}

    def moved(experiment: Experiment) -> None:
        ends[experiment.run_context.round] = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        start([("", config)], Path(folder) / "run", RunCallbacks(moved=moved))
    last = config.train.rounds
    return (ends[last] - ends[WARM]) / (last - WARM)


def measure(
    methods: Sequence[str], clients: Sequence[int], cohort: int, rounds: int, turns: int, plan: str
) -> dict[str, Any]:
    rows = []
    for method in methods:
        configs = {count: config_of(method, count, cohort, rounds, plan) for count in clients}
        taken: dict[int, list[float]] = {count: [] for count in clients}
        for _ in range(turns):
            for count, config in configs.items():
                taken[count].append(seconds_per_round(config))
        best = {count: min(times) for count, times in taken.items()}
        rows += [
            {
                "method": method,
                "registered": count,
                "cohort": cohort,
                "seconds_per_round": best[count],
                "ratio": best[count] / best[clients[0]],
                "turns": [round(t, 5) for t in taken[count]],
            }
            for count in clients
        ]
    return {"rows": rows, "rounds": rounds, "plan": plan}


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| method | registered | ms per round | ratio |", "|---|---|---|---|"]
    lines += [
        f"| {r['method']} | {r['registered']:,} | {r['seconds_per_round'] * 1e3:.1f} | {r['ratio']:.2f} |"
        for r in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=["fedavg", "ditto"])
    parser.add_argument("--clients", nargs="+", type=int, default=[100, 1_000, 10_000])
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--plan", default="vmap")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    given = vars(parser.parse_args())
    as_json = given.pop("json")
    result = measure(**given)
    print(json.dumps(result, indent=1) if as_json else table(result["rows"]))
