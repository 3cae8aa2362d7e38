"""One diagnosis to look at: figures that can be drawn into a picture or a page, and the numbers behind
them."""

from __future__ import annotations

import io
import math
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from markupsafe import Markup
from PIL import Image

from holdfast.core.errors import ConfigError
from holdfast.core.files import write_atomically
from holdfast.core.version import __version__
from holdfast.report import plots, svg
from holdfast.report.axis import Axis
from holdfast.report.charts import Series, curves, heat_map
from holdfast.report.drawing import Drawing, write_drawings
from holdfast.report.markup import whole_page

_MOST_ROWS, _MOST_COLUMNS = 150, 600  # of a map


@dataclass(frozen=True)
class CurvesFigure:
    """Lines with bands over rounds, or over another whole number."""

    title: str
    note: str
    series: Sequence[Series]
    percent: bool = False
    across: str = "round"

    def drawing(self) -> Drawing:
        lines = [(one.label, one.points) for one in self.series]
        return plots.curves(
            lines, "", self.percent, self.across, self._axis(), title=self.title, note=self.note
        )

    def html(self) -> Markup:
        drawn = curves(self.series, self.title, self.percent, self.across, self._axis())
        limit = "max-width: 760px"  # wider, its words would be larger than the page's
        return svg.element("div", drawn, style=limit)

    def _axis(self) -> Axis:
        return Axis.over([point for one in self.series for point in one.points])


@dataclass(frozen=True)
class MatrixFigure:
    """Numbers by column and row; `texts` are written into the cells, and empty ones stay empty."""

    title: str
    note: str
    values: Sequence[Sequence[float]]
    heads: Sequence[str]
    names: Sequence[str]
    words: tuple[str, str]
    texts: Sequence[Sequence[str]]
    legend: tuple[str, str] | None = None
    most: float = 1.0
    """What has the darkest shade."""

    def shown(self) -> MatrixFigure:
        """As much as one can look at: the first rows and columns."""
        rows, columns = len(self.names), len(self.heads)
        if rows <= _MOST_ROWS and columns <= _MOST_COLUMNS:
            return self
        down, across = min(rows, _MOST_ROWS), min(columns, _MOST_COLUMNS)
        return replace(
            self,
            note=f"{self.note} Drawn are {down:,} of {rows:,} rows and {across:,} of {columns:,} columns.",
            values=[column[:down] for column in self.values[:across]],
            texts=[column[:down] for column in self.texts[:across]],
            heads=self.heads[:across],
            names=self.names[:down],
        )

    def drawing(self) -> Drawing:
        cells = (self.values, self.heads, self.names, self.words, self.texts, self.most)
        return plots.heat_map(*cells, self.title, self.title, self.note, self.legend)

    def html(self) -> Markup:
        drawn = heat_map(
            self.values, self.names, self.title, 0, self.most, self.heads, (*self.words, ""), self.texts
        )
        return svg.element("div", drawn, class_="scroll")


@dataclass(frozen=True)
class ImageFigure:
    """A picture that is one already."""

    title: str
    note: str
    image: Image.Image

    def html(self) -> Markup:
        data = b64encode(image_bytes(self.image)).decode()
        source = f"data:image/png;base64,{data}"
        return svg.element("img", alt=self.title, width=self.image.width, src=source)


@dataclass(frozen=True)
class Diagnosis:
    """`frame` has all numbers, `short` those that one reads in a terminal."""

    title: str
    frame: pd.DataFrame
    short: pd.DataFrame
    figures: Sequence[CurvesFigure | MatrixFigure | ImageFigure]

    def write(self, path: Path) -> None:
        """Write numbers (.csv), a page (.html) or a picture (.png, .pdf, .svg), by the ending of the file."""
        ending = path.suffix.lower()
        if ending == ".csv":
            write_atomically(path, self.frame.to_csv(index=False).encode(errors="replace"))
        elif ending == ".html":
            write_atomically(path, self.page().encode(errors="replace"))
        elif isinstance(image := self.figures[0], ImageFigure):
            write_image(image.image, path)
        else:
            drawings = [one.drawing() for one in self.figures if not isinstance(one, ImageFigure)]
            write_drawings(drawings, path)

    def page(self) -> str:
        table = self.short.to_html(index=False, border=0, float_format=number, escape=True)
        return whole_page(
            "diagnosis.html",
            title=self.title,
            figures=self.figures,
            table=Markup(table),
            footer=f"Page by holdfast {__version__}.",
        )


def number(value: object) -> str:
    """For a table: four digits are enough to read."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    return str(value)


def write_image(image: Image.Image, path: Path) -> None:
    """Write an image in the format that the ending of the file says."""
    form = path.suffix.lower().removeprefix(".")
    if form == "svg":
        raise ConfigError(f"{path}: this picture is made of pixels; choose .png or .pdf")
    write_atomically(path, image_bytes(image, form))


def image_bytes(image: Image.Image, form: str = "png") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=form.upper(), **({"optimize": True} if form == "png" else {}))
    return buffer.getvalue()
