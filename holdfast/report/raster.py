"""Drawing with Pillow in points, on an image that is larger by a whole number: sharp on dense screens and on
paper."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from holdfast.core.files import write_atomically

SCALE = 2
PAPER, INK, SOFT, RULE, CELL, HEAT = "#ffffff", "#1b1f24", "#5d6670", "#e3e5e2", "#f1f2ef", (11, 95, 150)
LINES = (
    "#0072b2",
    "#c74f00",
    "#00825f",
    "#b0508a",
    "#a87000",
    "#5a55c9",
    "#555b61",
)  # as in the page's style
_FINER = 2  # lines are drawn larger still and then made smaller, which smooths them


class Pen:
    """An image to draw on. Boxes and words are put on as they are; lines and bands are collected on a finer
    sheet first."""

    def __init__(self, width: float, height: float):
        self.image = Image.new("RGB", (math.ceil(width * SCALE), math.ceil(height * SCALE)), PAPER)
        self.draw = ImageDraw.Draw(self.image)

    def box(self, x: float, y: float, to_x: float, to_y: float, colour: Any) -> None:
        corners = np.round(np.array([x, y, to_x, to_y]) * SCALE).astype(int).tolist()
        self.draw.rectangle(
            (corners[0], corners[1], max(corners[2] - 1, corners[0]), max(corners[3] - 1, corners[1])),
            fill=colour,
        )

    def text(self, x: float, y: float, words: str, size: int, colour: str = INK, anchor: str = "lm") -> None:
        self.draw.text((x * SCALE, y * SCALE), words, fill=colour, font=font(size), anchor=anchor)

    def shape(
        self, points: Sequence[tuple[float, float]], colour: str, width: float = 0.0, opacity: float = 1.0
    ) -> None:
        """A line of some width through the points, or, without a width, the area that they enclose."""
        finer = SCALE * _FINER
        mask = Image.new("L", (self.image.width * _FINER, self.image.height * _FINER), 0)
        pen, places = ImageDraw.Draw(mask), [(x * finer, y * finer) for x, y in points]
        if not width:
            pen.polygon(places, fill=255)
        else:
            pen.line(places, fill=255, width=round(width * finer), joint="curve")
        mask = mask.resize(self.image.size, Image.Resampling.BOX).point(
            [round(opacity * level) for level in range(256)]
        )
        self.image.paste(colour, (0, 0), mask)

    def dot(self, x: float, y: float, radius: float, colour: str) -> None:
        around = [2 * math.pi * i / 24 for i in range(24)]
        self.shape([(x + radius * math.cos(a), y + radius * math.sin(a)) for a in around], colour)


def font(size: int) -> Any:
    return ImageFont.load_default(size * SCALE)


def width_of(words: str, size: int) -> float:
    """In points."""
    return float(font(size).getlength(words)) / SCALE


def stacked(images: Sequence[Image.Image]) -> Image.Image:
    """One above the other."""
    sheet = Image.new("RGB", (max(i.width for i in images), sum(i.height for i in images)), PAPER)
    down = 0
    for image in images:
        sheet.paste(image, (0, down))
        down += image.height
    return sheet


def write_image(image: Image.Image, path: Path) -> None:
    write_atomically(path, png_of(image))


def png_of(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
