"""Runs every attack against every aggregator: FedAvg, 20 clients, 30 % of them malicious, one fused sweep for
each dataset.

    python benchmarks/defences.py --out runs/defences                       # digits, a few minutes on two
                                                                            cores
    python benchmarks/defences.py --out runs/defences --data fashion-mnist  # needs its files: see
                                                                            docs/data.md

Prints a table in Markdown, accuracy in per cent: aggregators down, attacks across. The same command continues
after an interruption."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import holdfast
from holdfast.core.registry import parts
from holdfast.results.run import load

DATA = {
    "digits": {"partition": {"name": "dirichlet", "beta": 0.5, "samples_per_client": 60}},
    "fashion-mnist": {"partition": {"name": "dirichlet", "beta": 0.5, "samples_per_client": 100}},
}


def config(data: str, rounds: int, seeds: int) -> dict[str, Any]:
    return {
        "data": {"name": data, "clients": 20, "root": 100, **DATA[data]},
        "method": "fedavg",
        "model": "mlp",
        "aggregator": {"f": 0.3},
        "train": {"rounds": rounds, "local_epochs": 2, "lr": 0.05},
        "evaluate": {"every": rounds},
        "sweep": {
            "aggregator.name": list(parts("aggregator")),
            "attack.name": ["none", *parts("attack")],
            "seed": list(range(seeds)),
            "override": [
                {"when": {"aggregator.name": "bulyan"}, "set": {"aggregator.f": 0.2}}
            ],  # it needs n >= 4 f + 3
        },
    }


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--data", choices=list(DATA), default="digits")
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--seeds", type=int, default=1)
    asked = options.parse_args()
    folder = asked.out / asked.data
    holdfast.sweep(config(asked.data, asked.rounds, asked.seeds), out=folder)
    runs = load(folder).dropna(subset="accuracy").fillna({"attack": "none"})
    table = runs.pivot_table(
        index="aggregator", columns="attack", values="accuracy", aggfunc="mean", dropna=False
    )
    attacks = [name for name in ("none", *parts("attack")) if name in table.columns]
    print("| | " + " | ".join(attacks) + " |\n|---|" + "---:|" * len(attacks))
    for rule, row in table.iterrows():
        print(
            f"| `{rule}` | "
            + " | ".join("–" if row[a] != row[a] else f"{100 * row[a]:.1f}" for a in attacks)
            + " |"
        )


if __name__ == "__main__":
    main()
