"""Measures what a round of FedCPA's rule costs: seconds and memory beyond the updates, with the comparison to
the last change of the model.

    python benchmarks/fedcpa.py                        # 100 clients of a ResNet-18: 4.4 GB of updates,
                                                       minutes
    python benchmarks/fedcpa.py --quick --out cpa.json # 20 clients of 1e5 numbers

Four in five clients have half of their update in common; the others send noise, so there is something to
filter."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext
from holdfast.aggregators.fedcpa import FedCPA
from holdfast.core.files import write_atomically
from holdfast.core.flat import Layout, Slot
from holdfast.core.keys import Key
from holdfast.core.peak_memory import forget_peak, peak
from holdfast.core.progress import progress


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="a small size")
    options.add_argument("--clients", type=int)
    options.add_argument("--numbers", type=float, help="of a model; default: 11e6")
    options.add_argument("--correlation", choices=("spearman", "pearson"), default="spearman")
    options.add_argument(
        "--still",
        type=float,
        default=0.0,
        help="share of the parameters that no client changes: they are all tied",
    )
    options.add_argument("--threads", type=int, help="default: PyTorch's own number")
    options.add_argument("--out", type=Path, help="JSON")
    asked = options.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    n, d = asked.clients or (20 if asked.quick else 100), int(asked.numbers or (1e5 if asked.quick else 11e6))
    found = measure(n, d, FedCPA(correlation=asked.correlation), asked.still)
    print(
        ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in found.items()
        )
    )
    if asked.out:
        write_atomically(asked.out, (json.dumps(found, indent=1) + "\n").encode())


def measure(n: int, d: int, rule: FedCPA, still: float) -> dict[str, Any]:
    luck = torch.Generator().manual_seed(0)
    received, before = torch.randn(d, generator=luck) * 0.05, torch.randn(d, generator=luck) * 0.05
    x, honest = updates(n, d, luck), n - n // 5
    x[:, : int(still * d)] = 0
    layout = Layout((Slot("weight", (d, 1), 0, d, x.dtype, buffer=False, frozen=False),))
    ctx = AggregationContext(torch.arange(n), received, layout, Key(0), 2, 0)
    forget_peak()
    held, started, worked = peak(), time.perf_counter(), time.process_time()
    got = rule(x, torch.full((n,), 1 / n), {"model": before}, ctx)
    seconds, cpu = time.perf_counter() - started, time.process_time() - worked
    weights = got.weights * (got.weights > 0).sum()
    return {
        "n": n,
        "d": d,
        "still": still,
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "CPU seconds": cpu,
        "GB of updates": x.nbytes / 1e9,
        "GB at the peak": peak() / 1e9,
        "GB beyond what was held": (peak() - held) / 1e9,
        "weight of the honest": float(weights[:honest].mean()),
        "weight of the others": float(weights[honest:].mean()),
    }


def updates(n: int, d: int, luck: torch.Generator) -> Tensor:
    x, common = torch.empty(n, d), torch.randn(d, generator=luck) * 0.01
    with progress(f"{n} updates", n) as advance:
        for i, row in enumerate(x):
            row.normal_(std=0.01, generator=luck)
            if i < n - n // 5:
                row += common
            advance(1)
    return x


if __name__ == "__main__":
    main()
