"""One diagnosis to look at: figures that can be drawn into a picture or a page, and the numbers behind
them."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from markupsafe import Markup
from PIL import Image

from holdfast.core.files import write_atomically
from holdfast.core.version import __version__
from holdfast.report import svg
from holdfast.report.axis import Axis
from holdfast.report.charts import Series, curves, heat_map
from holdfast.report.curves_png import draw_curves
from holdfast.report.heat_map_png import Map, draw_map
from holdfast.report.markup import whole_page
from holdfast.report.raster import png_of, stacked, write_image

_MOST_ROWS, _MOST_COLUMNS = 150, 600  # of a map


@dataclass(frozen=True)
class Curves:
    """Lines with bands over rounds, or over another whole number."""

    title: str
    note: str
    series: Sequence[Series]
    percent: bool = False
    across: str = "round"

    def drawn(self) -> Image.Image:
        return draw_curves(self.series, self.title, self.note, self.percent, self.across, self._axis())

    def html(self) -> Markup:
        drawn = curves(self.series, self.title, self.percent, self.across, self._axis())
        limit = "max-width: 760px"  # wider, its words would be larger than the page's
        return svg.element("div", drawn, style=limit)

    def _axis(self) -> Axis:
        return Axis.over([point for one in self.series for point in one.points])


@dataclass(frozen=True)
class Cells:
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

    def shown(self) -> Cells:
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

    def drawn(self) -> Image.Image:
        return draw_map(
            Map(
                self.title,
                self.note,
                self.values,
                self.heads,
                self.names,
                self.words,
                self.texts,
                self.most,
                self.legend,
            )
        )

    def html(self) -> Markup:
        drawn = heat_map(
            self.values, self.names, self.title, 0, self.most, self.heads, (*self.words, ""), self.texts
        )
        return svg.element("div", drawn, class_="scroll")


@dataclass(frozen=True)
class Sheet:
    """A picture that is one already."""

    title: str
    note: str
    image: Image.Image

    def drawn(self) -> Image.Image:
        return self.image

    def html(self) -> Markup:
        data = b64encode(png_of(self.image)).decode()
        source = f"data:image/png;base64,{data}"
        return svg.element("img", alt=self.title, width=self.image.width, src=source)


@dataclass(frozen=True)
class Diagnosis:
    """`frame` has all numbers, `short` those that one reads in a terminal."""

    title: str
    frame: pd.DataFrame
    short: pd.DataFrame
    figures: Sequence[Curves | Cells | Sheet]

    def write(self, path: Path) -> None:
        """By its ending: numbers (.csv), a picture (.png) or a page (.html)."""
        ending = path.suffix.lower()
        if ending == ".csv":
            write_atomically(path, self.frame.to_csv(index=False).encode(errors="replace"))
        elif ending == ".png":
            write_image(stacked([figure.drawn() for figure in self.figures]), path)
        else:
            write_atomically(path, self.page().encode(errors="replace"))

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
