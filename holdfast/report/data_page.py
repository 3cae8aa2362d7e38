"""One self-contained HTML page about who holds what, in the style of the report."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.files import write_atomically
from holdfast.core.version import __version__
from holdfast.report.charts import heat_map
from holdfast.report.class_counts import Holdings, what
from holdfast.report.markup import whole_page

_SIDE_BY_SIDE = 40  # clients, while numbers are to be read
_MOST_CELLS = 60_000  # of the maps: a browser has to draw them


def write_data_page(holdings: Holdings, path: Path) -> None:
    write_atomically(path, render(holdings).encode(errors="replace"))


def render(holdings: Holdings) -> str:
    """The page: maps of clients and classes, and every class in numbers."""
    counts, most = holdings.counts, int(holdings.counts.max())
    shown = min(len(counts), max(1, _MOST_CELLS // len(holdings.names)))
    band = _SIDE_BY_SIDE if shown <= 5 * _SIDE_BY_SIDE else 100
    maps = [
        heat_map(
            counts[first : min(first + band, shown)].tolist(),
            holdings.names,
            what(holdings.part).capitalize(),
            first,
            most,
            holdings.clients[first : min(first + band, shown)],
        )
        for first in range(0, shown, band)
    ]
    classes = zip(
        holdings.names,
        counts.sum(0).tolist(),
        (counts > 0).sum(0).tolist(),
        counts.max(0).tolist(),
        strict=True,
    )
    return whole_page(
        "data.html",
        title=holdings.title,
        facts=[(f"{word} ", text) for word, text in holdings.described()],
        what=what(holdings.part),
        most=most,
        shown=shown,
        clients=len(counts),
        maps=maps,
        classes=list(classes),
        footer=f"Page by holdfast {__version__}.",
    )
