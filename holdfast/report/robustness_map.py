"""The heat map of settings by attack: settings down, attacks across, the accuracy as text in every cell."""

from __future__ import annotations

import numpy as np
from markupsafe import Markup

from holdfast.report import plots, svg
from holdfast.report.axis import shorten
from holdfast.report.drawing import Drawing
from holdfast.report.settings_by_attack import WORST, Score, ScoreGrid

_WIDTH, _ROW, _HEAD, _LETTER = 1120.0, 46.0, 34.0, 7.6
_PALE, _DEEP = (
    0.03,
    0.5,
)  # of the heat colour: the page's ink stays legible on all shades, in light and in dark


def score_map(grid: ScoreGrid, about: str = "") -> Markup:
    """Darker for more right answers; a star, bold type and a frame mark the best of a column, so colour alone
    says nothing."""
    longest = max(len(shorten(setting, 28)) for setting in grid.settings)
    left = max(90.0, 16 + 8.2 * longest)
    widest = max(len(shorten(column, 18)) for column in grid.columns)
    apart = (
        14.0 if WORST in grid.columns else 0.0
    )  # the worst case is set apart: it is not an attack of its own
    wide = min(175.0, max(104.0, 20 + _LETTER * widest, (_WIDTH - left - apart) / len(grid.columns)))
    width, height = left + wide * len(grid.columns) + apart, _HEAD + _ROW * len(grid.settings)
    means = [score.mean for row in grid.scores for score in row if score is not None]
    low, high = (min(means), max(means)) if means else (0.0, 1.0)
    out = [_head_row(grid, left, wide, apart)]
    for down, (setting, scores) in enumerate(zip(grid.settings, grid.scores, strict=True)):
        y = _HEAD + _ROW * down
        name = svg.text("row", 0, y + _ROW / 2 + 4, shorten(setting, 28))
        cells = [svg.element("g", name, svg.title(setting), role="rowheader")]
        for place, (column, score) in enumerate(zip(grid.columns, scores, strict=True)):
            x = left + wide * place + (apart if column == WORST else 0)
            share = (
                0.0 if score is None else _PALE + (_DEEP - _PALE) * (score.mean - low) / ((high - low) or 1)
            )
            best = score is not None and score.mean == grid.best[place]
            cells.append(_cell(score, x, y, wide, share, best, f"{setting}, {column}", column == WORST))
        out.append(svg.element("g", *cells, role="row"))
    return svg.element(
        "svg",
        *out,
        class_="chart scores",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        style=f"max-width:{width:.0f}px;min-width:{0.72 * width:.0f}px",
        role="table",
        aria_label=f"Accuracy by setting and attack{about}",
    )


def map_drawing(grid: ScoreGrid, several: bool) -> Drawing:
    """The same map as a figure for papers."""
    known = [[score.mean if score else np.nan for score in row] for row in grid.scores]
    texts = [
        [_text(score, column) for score, column in zip(row, grid.columns, strict=True)] for row in grid.scores
    ]
    best = np.array([[mean == top for mean, top in zip(row, grid.best, strict=True)] for row in known])
    name = f"accuracy by setting and attack{f', {grid.data}' if several else ''}"
    return plots.score_map(name, grid.settings, grid.columns, np.array(known), texts, best)


def _text(score: Score | None, column: str) -> str:
    """What is written into a cell of the figure."""
    if score is None:
        return "–"
    spread = "" if score.spread is None else f" ± {100 * score.spread:.1f}"
    return f"{100 * score.mean:.1f}{spread} %" + (f"\n{score.attack}" if column == WORST else "")


def _head_row(grid: ScoreGrid, left: float, wide: float, apart: float) -> Markup:
    """The names of the columns."""
    out = [Markup('<g role="columnheader"></g>')]
    for place, column in enumerate(grid.columns):
        at = left + wide * (place + 0.5) + (apart if column == WORST else 0)
        name = svg.text("tick middle", at, 20, shorten(column, 18))
        out.append(svg.element("g", name, svg.title(column), role="columnheader"))
    return svg.element("g", *out, role="row")


def _cell(
    score: Score | None, x: float, y: float, wide: float, share: float, best: bool, where: str, worst: bool
) -> Markup:
    box = {
        "x": f"{x + 1.5:.1f}",
        "y": f"{y + 1.5:.1f}",
        "width": f"{wide - 3:.1f}",
        "height": f"{_ROW - 3:.0f}",
        "rx": 5,
    }
    middle, empty = x + wide / 2, svg.element("rect", class_="cell", **box)
    if score is None:
        return svg.element("g", empty, svg.text("spread", middle, y + 27, "–"), role="cell")
    spread = "" if score.spread is None else f"± {100 * score.spread:.1f}"
    under = " · ".join(filter(None, (spread, score.attack if worst else "")))
    mean = f"{100 * score.mean:.1f} %{' ★' if best else ''}"
    mark = " best" if best else ""
    drawn = [
        empty,
        svg.element("rect", class_=f"heat{mark}", fill_opacity=f"{share:.3f}", **box),
        svg.text(f"score{mark}", middle, y + (20 if under else 27), mean),
    ]
    if under:
        drawn.append(svg.text("spread", middle, y + 35, shorten(under, int(wide / 6.4))))
    return svg.element("g", *drawn, svg.title(f"{where}: {mean} {under}".rstrip()), role="cell")
