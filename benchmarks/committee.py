"""Compares settings of C-PFL's committee: what moves its threshold, and by which rule, without attack and
under four attacks; 20 clients of digits, an MLP.

    python benchmarks/committee.py --out runs/committee              # three seeds, a few minutes on one core
    python benchmarks/committee.py --out runs/committee --seeds 1

Prints two tables in Markdown: the accuracy of the benign clients' tuned models and, in brackets, of the
common model, in per cent; then how many of the submitted backbones were rejected. Means over seeds. The same
command continues after an interruption."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import holdfast
from holdfast.api import SweepCell

ATTACKS: dict[str, Any] = {
    "no attack": {"name": "none"},
    "input noise, sigma 1, 40 % redrawn": {
        "name": "input-noise",
        "sigma": 1.0,
        "fraction": 0.4,
        "redraw": True,
    },
    "label flip, 40 % redrawn": {"name": "label-flip", "fraction": 0.4, "redraw": True},
    "label flip, 40 % fixed": {"name": "label-flip", "fraction": 0.4},
    "label flip, 40 % fixed, scores inverted": {
        "name": "label-flip",
        "fraction": 0.4,
        "lies": {"score": "invert"},
    },
}
COMMITTEES: dict[str, Any] = {
    "none": False,
    "`all`": {"scores": "all"},
    "`admitted`": {"scores": "admitted"},
    "`members`": {"scores": "members"},
    "`all`, `per-round`": {"scores": "all", "rule": "per-round"},
    "`all`, `ema`": {"scores": "all", "rule": "ema"},
    "`all`, `prediction-interval`": {"scores": "all", "rule": "prediction-interval"},
}


def config(rounds: int, seeds: int) -> dict[str, Any]:
    return {
        "data": {
            "name": "digits",
            "clients": 20,
            "split": {"train": 0.6, "validation": 0.2, "test": 0.2},
            "partition": {"name": "dirichlet", "beta": 0.5, "samples_per_client": 60},
        },
        "method": "c-pfl",
        "model": "mlp",
        "train": {"rounds": rounds, "local_epochs": 2, "lr": 0.05},
        "evaluate": {"every": rounds},
        "engine": {"plan": "vmap", "threads": 1, "workers": 1},
        "sweep": {
            "attack": list(ATTACKS.values()),
            "method.committee": list(COMMITTEES.values()),
            "seed": list(range(seeds)),
        },
    }


def mean(cells: list[SweepCell], figure: str) -> float:
    return statistics.fmean(cell.final[figure] for cell in cells if cell.final)


def entry(cells: list[SweepCell]) -> str:
    return f"{100 * mean(cells, 'accuracy'):.1f} ({100 * mean(cells, 'accuracy/global'):.1f})"


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--seeds", type=int, default=3)
    asked = options.parse_args()
    found = holdfast.sweep(config(asked.rounds, asked.seeds), out=asked.out)
    groups = iter([found[first : first + asked.seeds] for first in range(0, len(found), asked.seeds)])
    table = {attack: {committee: next(groups) for committee in COMMITTEES} for attack in ATTACKS}
    guarded = list(COMMITTEES)[1:]
    print(f"\n| | {' | '.join(COMMITTEES)} |\n|---|{'---:|' * len(COMMITTEES)}")
    for attack, row in table.items():
        print(f"| {attack} | {' | '.join(entry(cells) for cells in row.values())} |")
    print(f"\n| rejected | {' | '.join(guarded)} |\n|---|{'---:|' * len(guarded)}")
    for attack, row in table.items():
        counts = (f"{mean(row[name], 'rejected'):.0f}" for name in guarded)
        print(f"| {attack} | {' | '.join(counts)} |")


if __name__ == "__main__":
    main()
