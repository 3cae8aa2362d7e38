"""Measures how long the aggregates of the experiments of a sweep take one by one and together, and how many
operations each way starts on a GPU:

    python benchmarks/together.py --device cuda                   # 48 experiments of 20 clients
    python benchmarks/together.py --experiments 4 --turns 1 krum clip
    python benchmarks/together.py --markdown

An aggregator is measured alone, a wrapper around the mean. Both ways are measured in turns, and the best turn
counts. Operations and waits are counted on the device that tests use in place of a GPU, by default with short
updates: each operation would start a kernel or two, and at each wait the host stands still until the device
is done. Long updates are taken in a few blocks of columns, and each block has its own operations:

    python benchmarks/together.py --counted 156810 --numbers      # no times, takes minutes"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.core.files import write_atomically
from holdfast.core.flat import Layout, Slot
from holdfast.core.keys import Key
from holdfast.core.progress import progress
from holdfast.core.registry import build, parts
from holdfast.core.types import State

CLIENTS, NUMBERS = 20, (4_810, 156_810)
SHARE = 0.2  # assumed attackers


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("rules", nargs="*", help="aggregators and wrappers; default: all")
    options.add_argument("--experiments", type=int, default=48)
    options.add_argument("--clients", type=int, default=CLIENTS)
    options.add_argument("--counted", type=int, default=64, help="of a model, when operations are counted")
    options.add_argument("--numbers", type=int, nargs="*", default=list(NUMBERS), help="of a model")
    options.add_argument("--device", default="cpu")
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--out", type=Path, help="JSON")
    options.add_argument("--markdown", action="store_true", help="print a table at the end")
    asked = options.parse_args()
    names = asked.rules or [*sorted(parts("aggregator")), *sorted(parts("wrapper"))]
    rows = [counts(name, asked.experiments, asked.clients, asked.counted) for name in names]
    for d in asked.numbers:
        x = updates(asked.experiments, asked.clients, d, torch.device(asked.device))
        with progress(f"d = {d:,}", len(names)) as advance:
            for row in rows:
                row |= measure(row["rule"], x, asked.turns)
                advance(1)
        del x
        if asked.out:
            write_atomically(asked.out, (json.dumps(rows, indent=1) + "\n").encode())
    for row in rows:
        print(row)
    if asked.markdown:
        print(markdown(rows, asked.numbers))


def rule_of(name: str) -> Aggregator:
    if name in parts("aggregator"):
        rule: Aggregator = build("aggregator", {"name": name, "f": SHARE})
        return rule
    around: Callable[[Aggregator], Aggregator] = build("wrapper", name)
    return around(build("aggregator", {"name": "mean", "f": SHARE}))


def updates(c: int, n: int, d: int, device: torch.device) -> Tensor:
    """Half in common, half their own; each experiment's drawn by itself, because drawing needs several times
    the room."""
    x = torch.empty(c, n, d, device=device)
    for place in range(c):
        key = Key(place)
        x[place] = key.fold("common").normal(d) + key.fold("own").normal(n, d)
    return x


def contexts_of(x: Tensor, rule: Aggregator) -> list[AggregationContext]:
    c, n, d = x.shape
    layout = Layout((Slot("weight", (d,), 0, d, x.dtype, buffer=False, frozen=False),))
    base = AggregationContext(
        torch.arange(n), torch.zeros(d, device=x.device), layout, Key(0), 1, rule.assumed(n)
    )
    needed = "root" in rule.needs
    return [replace(base, key=Key(i), root=x[i].mean(0) if needed else None) for i in range(c)]


def ways(name: str, x: Tensor) -> tuple[Callable[[], list[Reduced]], Callable[[], list[Reduced] | None]]:
    """The second round of all experiments, one by one and together: a rule that remembers has something to
    remember by then."""
    rule = rule_of(name)
    contexts = contexts_of(x, rule)
    w = torch.full(x.shape[:2], 1 / x.shape[1], device=x.device)
    start: list[State] = [rule.init(contexts[0].layout)] * len(x)

    def one_by_one(states: list[State]) -> list[Reduced]:
        return [rule(*of) for of in zip(x, w, states, contexts, strict=True)]

    before = rule.together(x, w, start, contexts) if rule.remembers() else None
    apart = [each.state for each in one_by_one(start)] if rule.remembers() else start
    joined = apart if before is None else [each.state for each in before]
    return lambda: one_by_one(apart), lambda: rule.together(x, w, joined, contexts)


def counts(name: str, c: int, n: int, d: int) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.pretended_gpu import pretended_gpu

    row: dict[str, Any] = {"rule": name}
    with pretended_gpu() as outer:
        one_by_one, together = ways(name, updates(c, n, d, torch.device("cpu")).to(outer.device))
        for way, work in (("one by one", one_by_one), ("together", together)):
            with pretended_gpu() as gpu:
                answer = work()
            some = answer is not None
            row |= {f"operations {way}": gpu.started.total() if some else None}
            row |= {f"waits {way}": gpu.reads if some else None}
    return row


def measure(name: str, x: Tensor, turns: int) -> dict[str, float | None]:
    """Microseconds for all experiments."""
    one_by_one, together = ways(name, x)
    best: dict[str, float | None] = {"one by one": None, "together": None}
    for _ in range(turns):
        for way, work in (("one by one", one_by_one), ("together", together)):
            spent, some = clock(work, x.device)
            if some:
                best[way] = min(best[way] or torch.inf, 1e6 * spent)
    return {f"microseconds {way}, d = {x.shape[2]}": spent for way, spent in best.items()}


def clock(work: Callable[[], list[Reduced] | None], device: torch.device) -> tuple[float, bool]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    kept = work()  # freeing memory is not part of it
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, kept is not None


def markdown(rows: list[dict[str, Any]], numbers: list[int]) -> str:
    columns = ["operations", "waits", *(f"microseconds, d = {d}" for d in numbers)]
    lines = ["| rule | " + " | ".join(f"{name}: one by one, together" for name in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for row in rows:
        cells = []
        for name in columns:
            kind, *rest = name.split(", ")
            both = [row[", ".join([f"{kind} {way}", *rest])] for way in ("one by one", "together")]
            cells.append(", ".join("-" if number is None else f"{number:,.0f}" for number in both))
        lines.append(f"| `{row['rule']}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
