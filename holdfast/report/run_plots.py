"""What matplotlib draws of a single run: fields of clients and rounds, thresholds, clients, bans, costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from holdfast.report.axis import Axis, shorten, tick_text
from holdfast.report.drawing import Drawing
from holdfast.report.plots import HEAT, SOFT, colour, dash, label_cells, legend_above, value_axis


def shaded(
    name: str,
    field: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    words: tuple[str, str],
    log: bool,
    percent: bool,
    low: float,
    high: float,
    crosses: Sequence[tuple[int, int]] = (),
) -> Drawing:
    """Clients down and rounds (or clients) across; cells without a value stay empty. Crosses mark bans."""
    side = min(0.3, max(0.02, 8.0 / max(len(columns), 1)))
    tall = min(0.2, max(0.05, 7.0 / max(len(rows), 1)))

    def draw(figure: Any) -> None:
        from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
        from matplotlib.ticker import FuncFormatter

        axes = figure.subplots()
        shades = LinearSegmentedColormap.from_list("heat", ["#eef3f7", HEAT])
        norm = LogNorm(low, high) if log else Normalize(low, high)
        values = np.ma.masked_invalid(np.where(np.isinf(field), high, field))
        drawn = axes.imshow(values, cmap=shades, norm=norm, aspect="auto", interpolation="nearest")
        label_cells(axes, columns, rows, side, tall)
        axes.set_xlabel(words[1])
        axes.set_ylabel(words[0])
        bar = figure.colorbar(drawn, ax=axes, pad=0.01)
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value, percent)))
        for row, column in crosses:
            axes.plot(column, row, marker="x", color="#b3261e", ms=5, mew=1.4)

    return Drawing(name, (max(5.2, 1.6 + side * len(columns)), 1.0 + tall * len(rows)), draw)


def stack(
    rounds: Sequence[int], piles: dict[str, list[float]], name: str, write: Callable[[float], str]
) -> Drawing:
    """What each round took, as a pile of its parts."""

    def draw(figure: Any) -> None:
        from matplotlib.ticker import FuncFormatter

        axes = figure.subplots()
        floor = np.zeros(len(rounds))
        for place, (word, values) in enumerate(piles.items()):
            axes.bar(rounds, values, bottom=floor, color=colour(place), label=word, width=0.9)
            floor += np.array(values)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("round")
        axes.set_ylabel(name)
        legend_above(axes)

    return Drawing(f"{name} by round", (5.6, 2.6), draw)


def bans(rows: Sequence[tuple[int, str, Sequence[tuple[int, bool]]]], last: int) -> Drawing:
    """A dot per ban, by round and setting: full for an attacker, hollow for a benign client."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for down, (place, _, banned) in enumerate(rows):
            seen: dict[int, int] = {}
            for round, rightly in banned:
                number = seen[round] = seen.get(round, -1) + 1
                y = down + (1 if number % 2 else -1) * min(0.4, 0.1 * ((number + 1) // 2))
                fill = colour(place) if rightly else "none"
                axes.plot(round, y, marker="o", ms=4, mfc=fill, mec=colour(place))
        axes.set_yticks(range(len(rows)), [shorten(label, 30) for _, label, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0.5, last + 0.5)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("round")
        axes.grid(axis="x")

    return Drawing("bans by round", (7.0, 0.9 + 0.4 * len(rows)), draw)


def thresholds(
    name: str,
    rounds: Sequence[int],
    kinds: Sequence[tuple[str, np.ndarray]],
    bound: np.ndarray,
    percent: bool,
) -> Drawing:
    """A thin line per client and a thick one for the median, for each kind of client, and the threshold."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for place, (kind, values) in enumerate(kinds):
            known = np.isfinite(values)
            if not known.any():
                continue
            axes.plot(rounds, values.T, color=colour(place), lw=0.4, alpha=0.5)
            mark, kind_name = "o^"[place], "median" if kind == "median" else f"median, {kind}"
            middle = np.array(
                [np.median(c[k]) if k.any() else np.nan for c, k in zip(values.T, known.T, strict=True)]
            )
            axes.plot(
                rounds,
                middle,
                color=colour(place),
                ls=dash(3 * place),
                lw=1.6,
                marker=mark,
                ms=4,
                label=kind_name,
            )
        axes.step(rounds, bound, where="post", color="#1b1f24", lw=1.2, label="threshold")
        everything = np.concatenate([bound, *(values.flatten() for _, values in kinds)])
        known_values = everything[np.isfinite(everything)].tolist()
        value_axis(axes.yaxis, axes.set_ylim, Axis.over([(0, v, v, v) for v in known_values]), percent)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("round")
        axes.grid(axis="y")
        axes.legend(frameon=False, fontsize=8)

    return Drawing(name, (7.0, 2.8), draw)


def client_curves(
    rounds: Sequence[int], charts: Sequence[tuple[str, np.ndarray, int | None]], mean: np.ndarray, low: float
) -> Drawing:
    """A small chart for each client: its accuracy, the mean of the benign clients dashed behind it, and a
    cross in the round of its ban. The names of attackers begin with a triangle."""
    across = min(8, len(charts))
    down = -(-len(charts) // across)

    def draw(figure: Any) -> None:
        grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flatten()
        for axes, (name, values, banned) in zip(grid, charts, strict=False):
            axes.plot(rounds, mean, color=SOFT, ls="--", lw=0.7)
            axes.plot(rounds, values, color=colour(1 if name.startswith("▲") else 0), lw=1.2)
            if banned is not None:
                axes.plot(max(banned, rounds[0]), low, marker="x", color="#b3261e", clip_on=False)
            axes.set_title(name, fontsize=8, loc="left", pad=2)
            axes.set_ylim(low, 1)
            value_axis(axes.yaxis, axes.set_ylim, None, True)
            axes.tick_params(labelsize=6)
        for axes in grid[len(charts) :]:
            axes.set_axis_off()

    return Drawing("every client over the rounds", (0.6 + 1.1 * across, 0.4 + 1.1 * down), draw)
