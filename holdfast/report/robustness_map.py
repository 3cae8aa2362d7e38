"""The heat map of who holds against whom: settings down, attacks across, the accuracy in words in every
cell."""

from __future__ import annotations

from html import escape

from holdfast.report.charts import shorten
from holdfast.report.settings_by_attack import WORST, Grid, Score

_WIDTH, _ROW, _HEAD, _LETTER = 1120.0, 46.0, 34.0, 7.6
_PALE, _DEEP = (
    0.03,
    0.5,
)  # of the heat colour: the page's ink stays legible on all shades, in light and in dark


def score_map(grid: Grid, about: str = "") -> str:
    """Darker for more right answers; a star, bold type and a frame mark the best of a column, so colour alone
    says nothing."""
    longest = max(len(shorten(setting, 28)) for setting in grid.settings)
    left = max(90.0, 16 + 8.2 * longest)
    widest = max(len(shorten(column, 18)) for column in grid.columns)
    apart = 14.0 if WORST in grid.columns else 0.0  # the worst case stands off: it is no attack of its own
    wide = min(175.0, max(104.0, 20 + _LETTER * widest, (_WIDTH - left - apart) / len(grid.columns)))
    width, height = left + wide * len(grid.columns) + apart, _HEAD + _ROW * len(grid.settings)
    means = [score.mean for row in grid.scores for score in row if score is not None]
    low, high = (min(means), max(means)) if means else (0.0, 1.0)
    size = (
        f'viewBox="0 0 {width:.0f} {height:.0f}"'
        f' style="max-width:{width:.0f}px;min-width:{0.72 * width:.0f}px"'
    )
    out = [
        f'<svg class="chart scores" {size} role="table" aria-label="Accuracy by setting and'
        f' attack{escape(about)}"><g role="row"><g role="columnheader"></g>'
    ]
    for place, column in enumerate(grid.columns):
        at = left + wide * (place + 0.5) + (apart if column == WORST else 0)
        name = f'<text class="tick middle" x="{at:.1f}" y="20">{escape(shorten(column, 18))}</text>'
        out.append(f'<g role="columnheader">{name}<title>{escape(column)}</title></g>')
    out.append("</g>")
    for down, (setting, scores) in enumerate(zip(grid.settings, grid.scores, strict=True)):
        y = _HEAD + _ROW * down
        name = f'<text class="row" x="0" y="{y + _ROW / 2 + 4:.1f}">{escape(shorten(setting, 28))}</text>'
        out.append(f'<g role="row"><g role="rowheader">{name}<title>{escape(setting)}</title></g>')
        for place, (column, score) in enumerate(zip(grid.columns, scores, strict=True)):
            x = left + wide * place + (apart if column == WORST else 0)
            share = (
                0.0 if score is None else _PALE + (_DEEP - _PALE) * (score.mean - low) / ((high - low) or 1)
            )
            best = score is not None and score.mean == grid.best[place]
            out.append(_cell(score, x, y, wide, share, best, f"{setting}, {column}", column == WORST))
        out.append("</g>")
    return "".join(out) + "</svg>"


def _cell(
    score: Score | None, x: float, y: float, wide: float, share: float, best: bool, where: str, worst: bool
) -> str:
    box = f'x="{x + 1.5:.1f}" y="{y + 1.5:.1f}" width="{wide - 3:.1f}" height="{_ROW - 3:.0f}" rx="5"'
    middle = x + wide / 2
    if score is None:
        return (
            f'<g role="cell"><rect class="cell" {box}/><text class="spread" x="{middle:.1f}"'
            f' y="{y + 27:.1f}">–</text></g>'
        )
    spread = "" if score.spread is None else f"± {100 * score.spread:.1f}"
    under = " · ".join(filter(None, (spread, score.attack if worst else "")))
    mean = f"{100 * score.mean:.1f} %{' ★' if best else ''}"
    lift = y + (20 if under else 27)
    small = (
        f'<text class="spread" x="{middle:.1f}"'
        f' y="{y + 35:.1f}">{escape(shorten(under, int(wide / 6.4)))}</text>'
        if under
        else ""
    )
    told = f"{where}: {mean} {under}".rstrip()
    return (
        f'<g role="cell"><rect class="cell" {box}/><rect class="heat{" best" if best else ""}"'
        f' fill-opacity="{share:.3f}" {box}/><text class="score{" best" if best else ""}" x="{middle:.1f}"'
        f' y="{lift:.1f}">{mean}</text>{small}<title>{escape(told)}</title></g>'
    )
