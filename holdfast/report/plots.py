"""What matplotlib draws on a figure: the charts of the page and of diagnoses, for files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from holdfast.report.axis import Axis, Point, round_step, shorten, tick_text
from holdfast.report.drawing import Drawing

COLOURS = ("#0072b2", "#c74f00", "#00825f", "#b0508a", "#a87000", "#5a55c9", "#555b61")  # as on the page
_DASHES = (0, 0, 0, 1, 1, 1, 2)
_STYLES, _MARKERS = ("-", "--", ":", "-."), "os^Dv"
SOFT = "#5d6670"
HEAT = "#0b5f96"
_MOST_TRIANGLES = 12  # of a line that leaves its chart
Rows = Sequence[Sequence[str]]


def colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def dash(place: int) -> str:
    """Lines of one colour have other dashes, and other marks (`mark`)."""
    turn, number = divmod(place, len(COLOURS))
    return _STYLES[(_DASHES[number] + 2 * turn) % len(_STYLES)]


def mark(place: int) -> str:
    return _MARKERS[place // len(COLOURS) % len(_MARKERS)]


def titled(figure: Any, title: str, note: str) -> Any:
    """One set of axes below a title and a note."""
    axes = figure.subplots()
    if title:
        figure.suptitle(title, fontsize=11, ha="left", x=0.01)
    if note:
        axes.set_title(note, fontsize=8, color=SOFT, loc="left", wrap=True)
    return axes


def curves(
    lines: Sequence[tuple[str, Sequence[Point]]],
    name: str,
    percent: bool,
    across: str,
    axis: Axis | None,
    places: Sequence[int] = (),
    title: str = "",
    note: str = "",
) -> Drawing:
    """Lines over rounds with bands from the lowest to the highest."""

    def draw(figure: Any) -> None:
        axes = titled(figure, title, note)
        draw_curves(axes, lines, percent, axis, places)
        axes.set_xlabel(across)
        axes.set_ylabel(name)
        if any(points for _, points in lines):
            beside = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)}  # there it hides no curve
            axes.legend(frameon=False, fontsize=8, **(beside if len(lines) > 1 else {"loc": "best"}))

    return Drawing(f"{name} by {across}", (5.6 if len(lines) == 1 else 7.0, 3.4), draw)


def draw_curves(
    axes: Any,
    lines: Sequence[tuple[str, Sequence[Point]]],
    percent: bool,
    axis: Axis | None,
    places: Sequence[int] = (),
) -> None:
    """Draw lines with their bands. Values above the axis have a triangle at its upper end, and the label
    says how high they go."""
    top = math.inf if axis is None else axis.ticks[-1]
    for number, (label, points) in enumerate(lines):
        if not points:
            continue
        place = places[number] if places else number
        rounds, means, lows, highs = np.array(points, dtype=float).T
        style = {"color": colour(place), "ls": dash(place), "marker": mark(place)}
        above = means > top + 1e-9 * abs(top)  # ticks are rounded
        if above.any():
            label = f"{label} (▲ up to {tick_text(means[above].max(), percent)})"
            shown = np.flatnonzero(above)[:: -(-int(above.sum()) // _MOST_TRIANGLES)]
            triangles = {"ls": "", "marker": "^", "ms": 5, "color": colour(place), "clip_on": False}
            axes.plot(rounds[shown], np.full(len(shown), top), zorder=3, **triangles)
        axes.plot(rounds, means, label=label, lw=1.4, ms=3.5, markevery=[-1], **style)
        if (lows < highs).any():
            axes.fill_between(rounds, lows, highs, color=colour(place), alpha=0.15, lw=0)
    value_axis(axes.yaxis, axes.set_ylim, axis, percent)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y")


def value_axis(side: Any, limit: Callable[..., Any], axis: Axis | None, percent: bool) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter

    if axis is not None:
        if axis.log:
            side.axes.set_yscale("log")
        limit(axis.ticks[0], axis.ticks[-1])
        side.set_major_locator(FixedLocator(list(axis.ticks)))
    side.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value, percent)))


def along(
    lines: Sequence[tuple[str, Sequence[Point]]], labels: Sequence[str], name: str, across: str
) -> Drawing:
    """One figure along the labels of an axis; bars reach from the lowest to the highest seed."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for number, (label, points) in enumerate(lines):
            if points:
                places, means, lows, highs = np.array(points, dtype=float).T
                bars = np.stack([means - lows, highs - means]).clip(min=0)
                style = {"color": colour(number), "ls": dash(number), "marker": "o", "ms": 3.5, "lw": 1.4}
                axes.errorbar(places, means, yerr=bars, label=label, capsize=2, **style)
        axes.set_xticks(range(len(labels)), [shorten(label, 16) for label in labels])
        axes.set_xlabel(across)
        axes.set_ylabel(name)
        axes.grid(axis="y")
        if any(points for _, points in lines):
            axes.legend(frameon=False, fontsize=8)

    return Drawing(f"{name} by {across}", (5.6, 3.4), draw)


def heat_map(
    values: Sequence[Sequence[float]],
    heads: Sequence[str],
    names: Sequence[str],
    words: tuple[str, str],
    texts: Rows,
    most: float,
    name: str,
    title: str = "",
    note: str = "",
    legend: tuple[str, str] | None = None,
) -> Drawing:
    """Values by column and row, darker for more; numbers in the cells where there is room. `words` name what
    is across and what is down, `legend` the least and the most."""
    columns, rows = len(heads), len(names)
    side = min(0.42, max(0.006, 10.0 / max(columns, 1)))
    tall = min(0.3, max(0.05, 7.0 / max(rows, 1)))
    letters = max((len(text) for column in texts for text in column), default=1)
    size = max(5.2, 1.4 + side * columns), 1.0 + tall * rows + (0.5 if title else 0)

    def draw(figure: Any) -> None:
        from matplotlib.colors import LinearSegmentedColormap, PowerNorm

        axes = titled(figure, title, note)
        field = np.array(values, dtype=float).reshape(columns, rows).T
        shades = LinearSegmentedColormap.from_list("heat", ["#f1f2ef", "#d6e6f4", HEAT])
        # a square root keeps small values visible
        norm = PowerNorm(0.5, 0, most or 1)
        drawn = axes.imshow(field, cmap=shades, norm=norm, aspect="auto", interpolation="nearest")
        if side * 72 >= 5 * letters + 2 and tall * 72 >= 9:
            for (row, column), value in np.ndenumerate(field):
                if value:
                    bright = math.sqrt(value / (most or 1)) > 0.6
                    ink = "white" if bright else "#1b1f24"
                    axes.text(
                        column, row, texts[column][row], ha="center", va="center", fontsize=7, color=ink
                    )
        label_cells(axes, heads, names, side, tall)
        axes.set_xlabel(words[0])
        axes.set_ylabel(words[1])
        if legend:
            bar = figure.colorbar(drawn, ax=axes, pad=0.01)
            bar.set_ticks([0, most or 1], labels=legend)

    return Drawing(name, size, draw)


def label_cells(axes: Any, heads: Sequence[str], names: Sequence[str], side: float, tall: float) -> None:
    """Labels of columns and rows, as many as there is room for."""
    longest = max((len(head) for head in heads), default=1)
    step, down = round_step((0.09 * longest + 0.05) / side), round_step(0.14 / tall)
    if (
        longest > 3 and step > 1 and not all(head.isdecimal() for head in heads)
    ):  # names: upright, not left out
        step = round_step(0.14 / side)
        shown = [shorten(head, 20) for head in list(heads)[::step]]
        axes.set_xticks(range(0, len(heads), step), shown, rotation=90)
    else:
        axes.set_xticks(range(0, len(heads), step), list(heads)[::step])
    axes.set_yticks(range(0, len(names), down), [shorten(name, 20) for name in list(names)[::down]])
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)


def client_dots(
    rows: Sequence[tuple[str, Sequence[Any], float | None, float | None]], places: Sequence[int]
) -> Drawing:
    """A row per setting: every client's accuracy, the mean and the mean of the worst tenth."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for down, (place, (_, dots, mean, worst)) in enumerate(zip(places, rows, strict=True)):
            benign = sorted(dot.accuracy for dot in dots if not dot.malicious)
            attackers = sorted(dot.accuracy for dot in dots if dot.malicious)
            style = {"ls": "", "color": colour(place), "ms": 4}
            axes.plot(benign, _jitter(benign, down), marker="o", alpha=0.6, mew=0, **style)
            axes.plot(attackers, _jitter(attackers, down), marker="^", fillstyle="none", **style)
            for value, line in ((mean, "-"), (worst, ":")):
                if value is not None:
                    axes.plot([value, value], [down - 0.4, down + 0.4], color="#1b1f24", ls=line, lw=1.2)
        axes.set_yticks(range(len(rows)), [shorten(label, 30) for label, *_ in rows])
        axes.invert_yaxis()
        value_axis(axes.xaxis, axes.set_xlim, None, True)
        axes.set_xlabel("accuracy; solid: mean, dotted: worst 10 %, triangles: attackers")
        axes.grid(axis="x")

    return Drawing("accuracy of every client", (7.0, 0.9 + 0.45 * len(rows)), draw)


def _jitter(values: Sequence[float], middle: float) -> list[float]:
    """Dots of nearly equal value are piled up around the middle of their row."""
    piles: dict[int, int] = {}
    out = []
    for value in values:
        number = piles[round(value * 100)] = piles.get(round(value * 100), -1) + 1
        out.append(middle + (1 if number % 2 else -1) * min(0.4, 0.07 * ((number + 1) // 2)))
    return out


def bars(
    rows: Sequence[tuple[str, Sequence[float]]],
    name: str,
    words: Sequence[str],
    write: Callable[[float], str],
) -> Drawing:
    """A bar per setting, its parts one after the other."""

    def draw(figure: Any) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        axes = figure.subplots()
        begin = np.zeros(len(rows))
        for place, word in enumerate(words):
            wide = np.array([values[place] for _, values in rows])
            axes.barh(range(len(rows)), wide, left=begin, color=colour(place), label=word, height=0.7)
            begin += wide
        axes.set_yticks(range(len(rows)), [shorten(label, 30) for label, _ in rows])
        axes.invert_yaxis()
        axes.xaxis.set_major_locator(MaxNLocator(4))  # so that labels as "250 kB" keep apart
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value).replace(".0 ", " ")))
        axes.set_xlabel(name)
        legend_above(axes)

    return Drawing(f"{name} of every setting", (6.4, 1.0 + 0.26 * len(rows)), draw)


def legend_above(axes: Any) -> None:
    """The legend above the chart, where it hides no bar."""
    axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=4)


def score_map(
    name: str,
    settings: Sequence[str],
    columns: Sequence[str],
    means: np.ndarray,
    texts: Rows,
    best: np.ndarray,
) -> Drawing:
    """Settings down, attacks across, the accuracy in every cell; the best of a column is bold."""

    def draw(figure: Any) -> None:
        from matplotlib.colors import LinearSegmentedColormap

        axes = figure.subplots()
        shades = LinearSegmentedColormap.from_list("scores", ["#f6f9fb", "#7fb0d0"])
        axes.imshow(np.ma.masked_invalid(means), cmap=shades, aspect="auto")
        for row, column in np.ndindex(means.shape):
            weight = "bold" if best[row, column] else "normal"
            axes.text(
                column, row, texts[row][column], ha="center", va="center", fontsize=8, fontweight=weight
            )
        axes.set_xticks(range(len(columns)), [shorten(column, 22) for column in columns])
        axes.set_yticks(range(len(settings)), [shorten(setting, 30) for setting in settings])
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)

    return Drawing(name, (2.2 + 1.25 * len(columns), 0.6 + 0.42 * len(settings)), draw)
