"""Measures how long every registered rule takes on [n, d] updates, and how much memory it adds relative to
the updates. Baselines are the weighted sum `w @ x`, one Gram product `x @ x.T` and one sort along the
clients:

    python benchmarks/aggregators.py                             # all sizes that fit into memory; minutes
    python benchmarks/aggregators.py --quick --out rules.json    # 20 clients of 1e5 numbers
    python benchmarks/aggregators.py krum median --device cuda
    python benchmarks/aggregators.py "foundation(median)" --clients 100
    python benchmarks/aggregators.py --markdown                  # also a table of everything at the end

Everything of one size is measured in turns, a turn of each after the other, and the best turn of each counts:
what the machine does besides then slows all of them. Memory is the most that is held beyond what was held
before, in a call of its own that follows one which does not count: the first also starts threads and finds
scratch memory that stays, which beside updates of 8 MB looks like several times as much as the rule's own. On
a CPU it is the process's resident set, after what was freed has been given back; on CUDA what PyTorch has
allocated."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Assessment, Reduced
from holdfast.core.files import write_atomically
from holdfast.core.flat import Layout, Slot
from holdfast.core.keys import Key
from holdfast.core.memory import give_back_memory
from holdfast.core.peak_memory import forget_peak, peak
from holdfast.core.progress import progress
from holdfast.core.registry import build, parts

CLIENTS, NUMBERS = (20, 100, 1000), (10**5, 10**6)
LARGEST = {"residual": 100 * 10**5}
"""Rules of which more would take minutes: the largest n * d."""
BESIDES = ("w @ x", "gram", "sort")
VARIANTS = {"foolsgold, no memory": {"name": "foolsgold", "memory": False}}
"""What is measured besides the rules with their default settings: FoolsGold's memory is a copy of the
updates."""
KIND = dict.fromkeys(("krum", "multi-krum", "clustered", "foolsgold", "foolsgold, no memory", "dnc"), "gram")
KIND |= dict.fromkeys(("mda", "smea", "caf", "autogm", "flame", "freqfed", "rflbat"), "gram")
KIND |= dict.fromkeys(("median", "trimmed-mean", "bulyan", "residual", "meamed", "monna"), "sort")
"""The baseline of a rule in the table; that of the others is w @ x."""
ROOM = 5  # times the updates: they, the sort's values and places, and some to spare
SHARE = 0.1  # assumed attackers: every rule bears them


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("rules", nargs="*", help="only these; default: every registered one")
    options.add_argument("--quick", action="store_true", help="only the smallest size")
    options.add_argument("--clients", type=int, nargs="+", help=f"default: {' '.join(map(str, CLIENTS))}")
    options.add_argument("--numbers", type=float, nargs="+", help="of a model; default: 1e5 1e6")
    options.add_argument("--device", default="cpu")
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--out", type=Path, help="JSON")
    options.add_argument("--markdown", action="store_true", help="print a table of all sizes at the end")
    asked = options.parse_args()
    names = asked.rules or sorted([*parts("aggregator"), *VARIANTS])
    clients = asked.clients or CLIENTS[: 1 if asked.quick else None]
    numbers = [int(d) for d in asked.numbers or NUMBERS[: 1 if asked.quick else None]]
    found: list[dict[str, Any]] = []
    for n in clients:
        for d in numbers:
            if not fits(n, d, asked.device):
                print(
                    f"n = {n}, d = {d:.0e}: left out, {ROOM * 4 * n * d / 1e9:.0f} GB would be needed",
                    flush=True,
                )
                continue
            found += measure(names, n, d, torch.device(asked.device), asked.turns)
            if asked.out:
                write_atomically(asked.out, (json.dumps(found, indent=1) + "\n").encode())
    if asked.markdown:
        print(markdown(found))


def fits(n: int, d: int, device: str) -> bool:
    """Whether the updates and what the most demanding rule adds fit into memory, with a reserve."""
    if device.startswith("cuda"):
        return ROOM * 4 * n * d < torch.cuda.mem_get_info(device)[0]
    return ROOM * 4 * n * d < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measure(names: list[str], n: int, d: int, device: torch.device, turns: int) -> list[dict[str, Any]]:
    x, w = updates(n, d, device), torch.full((n,), 1 / n, device=device)
    works: dict[str, Callable[[], object]] = {
        "w @ x": lambda: w @ x,
        "gram": lambda: x @ x.T,
        "sort": lambda: x.sort(dim=0),
    }
    works |= {
        name: call(VARIANTS.get(name, {"name": name}), x, w)
        for name in names
        if n * d <= LARGEST.get(name, n * d)
    }
    memory: dict[str, float] = {}
    seconds: dict[str, float] = {}
    with progress(f"n = {n}, d = {d:.0e}", len(works) * (turns + 1)) as advance:
        for name, work in works.items():
            memory[name] = added(work, device) / (4 * n * d)
            advance(1)
        for _ in range(turns):
            for name, work in works.items():
                seconds[name] = min(seconds.get(name, torch.inf), clock(work, device))
                advance(1)
    rows = []
    for name in works:
        ratios = {f"per {other}": seconds[name] / seconds[other] for other in BESIDES}
        rows.append(
            {
                "rule": name,
                "n": n,
                "d": d,
                "device": device.type,
                "seconds": seconds[name],
                **ratios,
                "memory": memory[name],
            }
        )
    show(rows)
    return rows


def updates(n: int, d: int, device: torch.device) -> Tensor:
    """Half in common, half their own; drawn in pieces, because drawing needs several times the room."""
    x, common = torch.empty(n, d, device=device), Key(0).fold("common").normal(d)
    for row in range(n):
        x[row] = common + Key(0).fold("own", row).normal(d)
    return x


def call(settings: dict[str, Any], x: Tensor, w: Tensor) -> Callable[[], object]:
    rule = built(settings | {"f": SHARE})
    n, d = x.shape
    layout = Layout((Slot("weight", (d,), 0, d, x.dtype, buffer=False, frozen=False),))
    ctx = AggregationContext(
        torch.arange(n),
        torch.zeros(d, device=x.device),
        layout,
        Key(0),
        1,
        rule.assumed(n),
        x[0] if "root" in rule.needs else None,
        assess=untested,
    )
    state = rule.init(layout)
    return lambda: rule(x, w, state, ctx)


def built(settings: dict[str, Any]) -> Aggregator:
    """A rule by name, or one in a wrapper: "foundation(median)"."""
    outer, _, inner = settings["name"].removesuffix(")").partition("(")
    rule: Aggregator = build("aggregator", settings | {"name": inner or outer})
    return build("wrapper", outer)(rule) if inner else rule


def untested(candidates: Callable[[], Sequence[Reduced]]) -> Assessment:
    """In place of the server's test, which takes time of its own: all models are as good."""
    none = torch.zeros(len(candidates()))
    return Assessment(none, none)


def clock(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    kept = work()  # freeing memory is not part of it
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    spent = time.perf_counter() - started
    del kept
    return spent


def added(work: Callable[[], object], device: torch.device) -> float:
    """Bytes at the peak of a second call beyond what is held before it."""
    work()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    give_back_memory()
    forget_peak()
    before = peak()
    work()
    return peak() - before


def show(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    print(f"n = {first['n']}, d = {first['d']:.0e} on {first['device']}", flush=True)
    print(
        f"  {'':<20} {'seconds':>10} "
        + " ".join(f"{'x ' + other:>9}" for other in BESIDES)
        + f" {'x memory':>9}"
    )
    for row in rows:
        ratios = " ".join(f"{row[f'per {other}']:>9.2f}" for other in BESIDES)
        print(f"  {row['rule']:<20} {row['seconds']:>10.5f} {ratios} {row['memory']:>9.2f}", flush=True)


def markdown(rows: list[dict[str, Any]]) -> str:
    """A line for each rule, a column for each size: milliseconds, times what the rule cannot do without, and
    memory added in times the updates'."""
    sizes = list(dict.fromkeys((row["n"], row["d"]) for row in rows))
    by = {(row["rule"], row["n"], row["d"]): row for row in rows}
    lines = [
        "| rule | beside | "
        + " | ".join(f"n = {n:,}, d = {d:.0e}".replace("e+0", "e") for n, d in sizes)
        + " |"
    ]
    lines.append("|---" * (len(sizes) + 2) + "|")
    for name in dict.fromkeys(row["rule"] for row in rows):
        other = name if name in BESIDES else KIND.get(name, BESIDES[0])
        cells = [_cell(by[name, *size], other) if (name, *size) in by else "" for size in sizes]
        lines.append(f"| `{name}` | {'' if name == other else f'`{other}`'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any], other: str) -> str:
    ratio = "" if row["rule"] == other else f", {row[f'per {other}']:.2f}x"
    milliseconds = 1000 * row["seconds"]
    return f"{milliseconds:,.{0 if milliseconds >= 10 else 2}f} ms{ratio}, {max(0.0, row['memory']):.1f}"


if __name__ == "__main__":
    main()
