"""The client x class table as a heat map in a terminal: numbers on colour where there is room, else shades;
never wider than the window."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.text import Text

from holdfast.data.partitions.base import even
from holdfast.report.axis import shorten
from holdfast.report.class_counts import Holdings

MOST_CLIENTS = 40  # lines that one still reads
_SHADES = "·░▒▓█"
_LOW, _HIGH = (
    (214, 230, 244),
    (8, 72, 140),
)  # few and many samples; both ends are readable on a dark and on a light terminal


def heat_lines(holdings: Holdings, width: int, everybody: bool = False) -> Iterator[Text]:
    """Lines of text: a client each, then all clients together. A table that is too wide goes on below, some
    classes at a time."""
    counts, sizes, late = holdings.counts, holdings.sizes, set(holdings.federation.held_out)
    shown = counts if everybody else counts[:MOST_CLIENTS]
    names = [shorten(name, 20) for name in holdings.clients]
    heads = [f"{names[client]}{'*' if client in late else ''}" for client in range(len(shown))]
    right = max(len("samples"), len(f"{sizes.sum():,}")) + 2
    wide = _wide(holdings, width - len("all clients") - right - 2)
    left = max(len("all clients" if wide > 1 else "client"), *map(len, heads)) + 1
    for columns in _bands(len(holdings.names), max(1, (width - left - right - 1) // wide)):
        yield _head(holdings, columns, wide, left, right)
        for head, row, size in zip(heads, shown[:, columns], sizes, strict=False):
            yield Text.assemble(
                head.rjust(left) + " ", *_cells(row, int(counts.max()), wide), f"{size:,}".rjust(right)
            )
        if len(shown) < len(counts):
            yield Text(
                f"{'...':>{left}} {len(counts) - len(shown):,} more clients; --all prints them, --html and"
                " --png draw them",
                "dim",
            )
        for name, row in (
            (("all clients", counts.sum(0)), ("held by", (counts > 0).sum(0))) if wide > 1 else ()
        ):
            total = f"{row.sum():,}".rjust(right) if name == "all clients" else ""
            yield Text.assemble(
                (name.rjust(left) + " ", "bold"), "".join(f"{n:>{wide}}" for n in row[columns]), total
            )
        yield Text()
    if wide == 1:
        yield Text(
            f"{_SHADES[0]} none, {_SHADES[1]} to {_SHADES[-1]} up to {counts.max():,} by square root; --json"
            " has the numbers",
            "dim",
        )
    if late & set(range(len(shown))):
        yield Text("* held out: never trains, joins late", "dim")


def _wide(holdings: Holdings, room: int) -> int:
    """Letters for a class: for its name, else for its number; 1 means a shade, where there are many classes
    and not enough room."""
    classes, most = len(holdings.names), len(str(holdings.counts.sum(0).max()))
    wide = max(most, min(6, max(map(len, holdings.names)))) + 1
    if wide * classes > room:
        wide = max(most, len(str(classes - 1))) + 1
    if wide * classes > room and classes > 20:
        wide = 1
    return wide


def _bands(classes: int, fit: int) -> list[slice]:
    """Which classes are side by side: as few bands as possible, of nearly equal width."""
    edges = np.cumsum(even(classes, -(-classes // fit)))
    return [slice(int(first), int(last)) for first, last in zip([0, *edges[:-1]], edges, strict=True)]


def _head(holdings: Holdings, columns: slice, wide: int, left: int, right: int) -> Text:
    names = range(columns.start, columns.stop)
    if wide == 1:  # every tenth class has its number
        marks = "".join(str(k).ljust(10) for k in names if k % 10 == 0)
        start = -columns.start % 10
        text = (" " * start + marks)[: len(names)].ljust(len(names))
    else:
        fits = max(map(len, holdings.names)) < wide or holdings.federation.samples.class_names and wide >= 7
        text = "".join(f"{shorten(holdings.names[k], wide - 1) if fits else k:>{wide}}" for k in names)
    return Text(f"{'client':>{left}} {text}{'samples':>{right}}", "bold")


def _cells(row: np.ndarray, most: int, wide: int) -> Iterator[Text]:
    for count in row.tolist():
        share = (count / max(most, 1)) ** 0.5  # a square root keeps small counts visible
        if wide == 1:
            yield Text(_SHADES[0 if not count else 1 + min(3, int(share * 4))], "blue" if count else "dim")
        elif not count:
            yield Text("·".rjust(wide), "dim")
        else:
            red, green, blue = (
                round(low + (high - low) * share) for low, high in zip(_LOW, _HIGH, strict=True)
            )
            yield Text(
                f"{count:>{wide}}", f"{'#ffffff' if share > 0.5 else '#000000'} on rgb({red},{green},{blue})"
            )
