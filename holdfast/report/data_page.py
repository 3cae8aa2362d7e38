"""One self-contained HTML page about who holds what, in the style of the report."""

from __future__ import annotations

from html import escape
from pathlib import Path

from holdfast.core.files import write_atomically
from holdfast.core.version import __version__
from holdfast.report.charts import heat_map
from holdfast.report.class_counts import Holdings, what
from holdfast.report.page import document, header

_SIDE_BY_SIDE = 40  # clients, while numbers are to be read
_MOST_CELLS = 60_000  # of the maps: a browser has to draw them


def write_data_page(holdings: Holdings, path: Path) -> None:
    write_atomically(path, render(holdings).encode(errors="replace"))


def render(holdings: Holdings) -> str:
    facts = "".join(f"<li>{escape(word)} <b>{escape(text)}</b></li>" for word, text in holdings.described())
    body = [
        header("data", holdings.title, f'<ul class="facts">{facts}</ul>'),
        _maps(holdings),
        _table(holdings),
        f"<footer>Page by holdfast {escape(__version__)}.</footer>",
    ]
    return document(holdings.title, body)


def _maps(holdings: Holdings) -> str:
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
        )
        for first in range(0, shown, band)
    ]
    only = f" The first {shown:,} of {len(counts):,} clients." if shown < len(counts) else ""
    drawn = "".join(f'<div class="scroll">{one}</div>' for one in maps)
    note = (
        f"The strongest shade is {most:,} {what(holdings.part)}, the others go by the square root. Point at a"
        f" cell to read it.{only}"
    )
    return f'<section><h2>Who holds what</h2><p class="note">{note}</p>{drawn}</section>'


def _table(holdings: Holdings) -> str:
    """Every class in numbers: how much there is, and how many clients have it."""
    total, holders = holdings.counts.sum(0), (holdings.counts > 0).sum(0)
    largest = holdings.counts.max(0)
    rows = "".join(
        "<tr><th"
        f' scope="row">{escape(name)}</th><td>{total[kind]:,}</td><td>{holders[kind]:,}</td><td>{largest[kind]:,}</td></tr>'  # noqa: E501
        for kind, name in enumerate(holdings.names)
    )
    heads = "".join(
        f'<th scope="col">{word}</th>'
        for word in ("class", what(holdings.part), "clients with it", "most with one client")
    )
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<section><details><summary>Every class in numbers</summary>{table}</details></section>"
