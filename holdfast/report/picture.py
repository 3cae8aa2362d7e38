"""The client x class heat map as a PNG, drawn with Pillow, which reading images needs anyway."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from holdfast.files import write_atomically
from holdfast.report.charts import round_step, shorten
from holdfast.report.holdings import Holdings, what

_SCALE = 2  # pixels per point: sharp on dense screens and on paper
_PAPER, _INK, _SOFT, _CELL, _HEAT = "#ffffff", "#1b1f24", "#5d6670", "#f1f2ef", (11, 95, 150)
_TOP, _EDGE = 80, 20
_MOST_CLIENTS = 2_000
_RAMP = 160  # points


def write_png(holdings: Holdings, path: Path) -> None:
    buffer = io.BytesIO()
    draw_holdings(holdings).save(buffer, format="PNG", optimize=True)
    write_atomically(path, buffer.getvalue())


def draw_holdings(holdings: Holdings) -> Image.Image:
    """Clients across, classes down, darker for more samples; numbers where there is room."""
    counts = holdings.counts[:_MOST_CLIENTS]
    clients, classes = counts.shape
    pen = _Pen(holdings.names)
    side = min(44.0, max(1.0, (1400 - pen.left) / clients))
    tall = min(30.0, max(4.0, 900 / classes))
    pen.open(max(pen.left + side * clients + _EDGE, 760), _TOP + tall * classes + 76)
    pen.text(_EDGE, 24, holdings.title, 17)
    pen.text(_EDGE, 46, f"{holdings.federation.clients:,} clients, dealt by {dict(holdings.described())['dealt by']}", 12, _SOFT)
    most = max(int(holdings.counts.max()), 1)
    roomy = side >= 7 * len(str(most)) + 4 and tall >= 14
    gap = 1.0 if min(side, tall) >= 6 else 0.0
    for client, row in enumerate(counts.tolist()):
        for kind, count in enumerate(row):
            at, down, share = pen.left + side * client, _TOP + tall * kind, math.sqrt(count / most)
            pen.box(at, down, at + side - gap, down + tall - gap, _shade(share) if count else _CELL)
            if count and roomy:
                pen.text(at + side / 2, down + tall / 2, str(count), 10, _PAPER if share > 0.6 else _INK, "mm")
    below = _TOP + tall * classes
    for kind in range(0, classes, round_step(13 / tall)):
        pen.text(pen.left - 8, _TOP + tall * (kind + 0.5), shorten(holdings.names[kind], 20), 11, _SOFT, "rm")
    for client in range(0, clients, round_step(8 * len(str(clients)) / side)):
        pen.text(pen.left + side * (client + 0.5), below + 12, str(client), 11, _SOFT, "mm")
    for word, down in (("class", _TOP - 10), ("client", below + 12)):
        pen.text(pen.left - 10, down, word, 11, _SOFT, "rm")
    _legend(pen, below + 46, most, holdings)
    return pen.image


def _legend(pen: _Pen, down: float, most: int, holdings: Holdings) -> None:
    """What the shades mean, and what of the clients is not shown."""
    for step in range(_RAMP):
        pen.box(pen.left + step, down - 6, pen.left + step + 1, down + 6, _shade(math.sqrt((step + 1) / _RAMP)))
    hidden = len(holdings.counts) - _MOST_CLIENTS
    more = f"; {hidden:,} more clients are not drawn" if hidden > 0 else ""
    pen.text(pen.left - 8, down, "1", 11, _SOFT, "rm")
    pen.text(pen.left + _RAMP + 8, down, f"{most:,} {what(holdings.part)}{more}", 11, _SOFT, "lm")


def _shade(share: float) -> tuple[int, int, int]:
    red, green, blue = (round(255 + (dark - 255) * share) for dark in _HEAT)
    return red, green, blue


class _Pen:
    """Draws in points on an image that is larger by a whole number."""

    def __init__(self, names: list[str]):
        self.left = max(_EDGE + 44.0, _EDGE + 8 + max(self._font(11).getlength(shorten(name, 20)) for name in names) / _SCALE)
        self.image = Image.new("RGB", (1, 1))

    def open(self, width: float, height: float) -> None:
        self.image = Image.new("RGB", (math.ceil(width * _SCALE), math.ceil(height * _SCALE)), _PAPER)
        self.draw = ImageDraw.Draw(self.image)

    def box(self, x: float, y: float, to_x: float, to_y: float, colour: Any) -> None:
        corners = np.round(np.array([x, y, to_x, to_y]) * _SCALE).astype(int).tolist()
        self.draw.rectangle((corners[0], corners[1], max(corners[2] - 1, corners[0]), max(corners[3] - 1, corners[1])), fill=colour)

    def text(self, x: float, y: float, words: str, size: int, colour: str = _INK, anchor: str = "lm") -> None:
        self.draw.text((x * _SCALE, y * _SCALE), words, fill=colour, font=self._font(size), anchor=anchor)

    def _font(self, size: int) -> Any:
        return ImageFont.load_default(size * _SCALE)
