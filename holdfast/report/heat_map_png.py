"""Heat maps as PNG, drawn with Pillow, which reading images needs anyway: who holds what, and whatever else
has rows and columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from holdfast.report.axis import round_step, shorten
from holdfast.report.class_counts import Holdings, what
from holdfast.report.raster import CELL, HEAT, INK, PAPER, SOFT, Pen, width_of, write_image

_TOP, _EDGE = 80, 20
_MOST_CLIENTS = 2_000
_RAMP = 160  # points


@dataclass(frozen=True)
class Map:
    """Values by column and row, darker for more; a 0 is an empty cell."""

    title: str
    note: str
    values: Sequence[Sequence[float]]
    """A list per column."""
    heads: Sequence[str]
    names: Sequence[str]
    """Of the rows."""
    words: tuple[str, str]
    """What is across, and what is down."""
    texts: Sequence[Sequence[str]]
    most: float
    legend: tuple[str, str] | None
    """The least and the most, in words; none where shades mean nothing."""


def write_png(holdings: Holdings, path: Path) -> None:
    write_image(draw_holdings(holdings), path)


def draw_holdings(holdings: Holdings) -> Image.Image:
    """Clients across, classes down, darker for more samples."""
    counts = holdings.counts[:_MOST_CLIENTS].tolist()
    most, hidden = max(int(holdings.counts.max()), 1), len(holdings.counts) - _MOST_CLIENTS
    more = f"; {hidden:,} more clients are not drawn" if hidden > 0 else ""
    note = f"{holdings.federation.clients:,} clients, dealt by {dict(holdings.described())['dealt by']}"
    heads, texts = list(map(str, range(len(counts)))), [list(map(str, row)) for row in counts]
    legend = ("1", f"{most:,} {what(holdings.part)}{more}")
    return draw_map(
        Map(holdings.title, note, counts, heads, holdings.names, ("client", "class"), texts, most, legend)
    )


def draw_map(map: Map) -> Image.Image:
    """Numbers in the cells where there is room."""
    left = _EDGE + max(44.0, 10 + max(width_of(shorten(name, 20), 11) for name in (*map.names, *map.words)))
    side = min(44.0, max(1.0, (1400 - left) / max(len(map.heads), 1)))
    tall = min(30.0, max(4.0, 900 / max(len(map.names), 1)))
    lines = 2 * _EDGE + max(width_of(map.title, 17), width_of(map.note, 12))
    wide = max(left + side * len(map.heads) + _EDGE, 760, lines)
    below = _TOP + tall * len(map.names)
    pen = Pen(wide, below + (76 if map.legend else 36))
    pen.text(_EDGE, 24, map.title, 17)
    pen.text(_EDGE, 46, map.note, 12, SOFT)
    _cells(pen, map, left, side, tall)
    for row in range(0, len(map.names), round_step(13 / tall)):
        pen.text(left - 8, _TOP + tall * (row + 0.5), shorten(map.names[row], 20), 11, SOFT, "rm")
    for column in range(0, len(map.heads), round_step(8 * max(_longest(map.heads), 1) / side)):
        pen.text(left + side * (column + 0.5), below + 12, map.heads[column], 11, SOFT, "mm")
    for word, down in ((map.words[1], _TOP - 10), (map.words[0], below + 12)):
        pen.text(left - 10, down, word, 11, SOFT, "rm")
    if map.legend:
        _legend(pen, left, below + 46, map.legend)
    return pen.image


def _cells(pen: Pen, map: Map, left: float, side: float, tall: float) -> None:
    roomy = side >= 7 * max((_longest(row) for row in map.texts), default=1) + 4 and tall >= 14
    gap = 1.0 if min(side, tall) >= 6 else 0.0
    for column, values in enumerate(map.values):
        for row, value in enumerate(values):
            at, down, share = (
                left + side * column,
                _TOP + tall * row,
                math.sqrt(value / map.most),
            )  # keeps small ones visible
            pen.box(at, down, at + side - gap, down + tall - gap, _shade(share) if value else CELL)
            if value and roomy:
                pen.text(
                    at + side / 2,
                    down + tall / 2,
                    map.texts[column][row],
                    10,
                    PAPER if share > 0.6 else INK,
                    "mm",
                )


def _legend(pen: Pen, left: float, down: float, words: tuple[str, str]) -> None:
    """What the shades mean."""
    for step in range(_RAMP):
        pen.box(left + step, down - 6, left + step + 1, down + 6, _shade(math.sqrt((step + 1) / _RAMP)))
    pen.text(left - 8, down, words[0], 11, SOFT, "rm")
    pen.text(left + _RAMP + 8, down, words[1], 11, SOFT, "lm")


def _longest(texts: Sequence[str]) -> int:
    return max((len(text) for text in texts), default=0)


def _shade(share: float) -> tuple[int, int, int]:
    red, green, blue = (round(255 + (dark - 255) * share) for dark in HEAT)
    return red, green, blue
