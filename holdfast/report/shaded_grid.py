"""Numbers as a field of shaded cells, for many rounds by one slider. Values travel with the drawing, two
letters each, so that a pointer or the arrow keys can read them and the slider can draw another round; what is
drawn at first needs no script, and prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup

from holdfast.report import run_plots, svg
from holdfast.report.axis import round_step
from holdfast.report.drawing import Drawing
from holdfast.report.markup import attribute_json, fill

LEVELS = 12  # shades; level 0 is a recorded zero, and where nothing was recorded there is no cell
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
STEPS = 64 * 64 - 2  # of a scale; one more code says that there is nothing
_WIDTH = 1120
_BRIGHT = 7  # from this shade on, words in a cell need the other colour


@dataclass(frozen=True)
class Scale:
    """Where values lie between the faintest shade (0) and the darkest (1)."""

    low: float
    high: float
    log: bool = False

    @staticmethod
    def over(values: np.ndarray, share: bool = False) -> Scale:
        """From 0 where the values reach down to it, else from the least of them, or differences would not be
        seen; by powers where a few would outshine all others, but for shares, whose size is the point."""
        finite = values[np.isfinite(values)]
        if not finite.size:
            return Scale(0.0, 1.0)
        low, high = float(finite.min()), float(finite.max())
        if not share and low > 0 and high > 20 * float(np.median(finite)):
            return Scale(low, high, log=True)
        low = 0.0 if 0 <= low < 0.5 * high or low == high >= 0 else low
        return Scale(low, high if high > low else low + 1.0)

    def shares(self, values: np.ndarray) -> np.ndarray:
        """NaN stays; what is not finite otherwise is the most."""
        capped = np.clip(np.where(np.isinf(values), self.high, values), self.low, self.high)
        if self.log:
            return (np.log(capped) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (capped - self.low) / (self.high - self.low)

    def levels(self, values: np.ndarray) -> np.ndarray:
        """0 ... LEVELS, and -1 where there is nothing."""
        shares = self.shares(values)
        levels = 1 + np.minimum(np.nan_to_num(shares) * LEVELS, LEVELS - 1).astype(int)
        if self.low == 0:
            levels[values == 0] = 0
        levels[np.isnan(values)] = -1
        return levels

    def packed(self, values: np.ndarray) -> str:
        """Two letters for each value, row by row."""
        codes = np.nan_to_num(np.round(self.shares(values) * STEPS), nan=STEPS + 1).astype(int).flatten()
        letters = np.array(list(LETTERS))
        return "".join(np.stack([letters[codes // 64], letters[codes % 64]], axis=1).flatten().tolist())


@dataclass(frozen=True, eq=False)
class ShadedGrid:
    """`frames` [rounds, rows, columns]; several rounds get a slider. Names that begin with a triangle are
    attackers'."""

    name: str
    rows: Sequence[str]
    columns: Sequence[str]
    frames: np.ndarray
    words: tuple[str, str] = ("client", "round")
    share: bool = False
    rounds: Sequence[int] = ()
    row_names: Sequence[Sequence[str]] = ()
    """For each frame, where they change from one to the next."""
    texts: Sequence[Sequence[str]] = ()
    """Text of a cell in place of its value; for a single frame."""
    marks: Sequence[tuple[str, str]] = ()
    """Class and path, in cells: drawn above the first frame."""
    says: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """Further text about a cell."""
    flags: int = 0
    """How many of the last rows are yes or no: 1 or 0."""
    merged: bool = False
    """Cells of a row that look alike run into each other: smaller, and quieter."""
    square: bool = False
    legend: bool = True
    most_tall: float = 20.0
    crosses: Sequence[tuple[int, int]] = ()
    """Cells with a ban, for figures."""
    top: float = 0.0
    """What has the darkest shade; 0: the largest value."""

    @property
    def scale(self) -> Scale:
        return Scale(0.0, self.top) if self.top else Scale.over(self.frames, self.share)

    def html(self) -> Markup:
        scale = self.scale
        return fill(
            "shaded_grid.html", grid=self, data=self._data(scale), chart=self._chart(scale), levels=LEVELS
        )

    def drawing(self) -> Drawing:
        """The last frame as a figure for papers."""
        scale = self.scale
        return run_plots.shaded(
            self.name,
            self.frames[-1],
            self.row_names[-1] if self.row_names else self.rows,
            self.columns,
            self.words,
            scale.log,
            self.share,
            scale.low,
            scale.high,
            self.crosses,
        )

    def _chart(self, scale: Scale) -> Markup:
        """The last frame."""
        frame, box = self.frames[-1], self._box()
        left, top, wide, tall = box
        height = top + tall * len(self.rows) + (34 if any(map(_bad, self.columns)) else 22)
        cells = svg.element(
            "g",
            *self._shades(scale.levels(frame)),
            self._split(),
            *(svg.path(kind, path) for kind, path in self.marks),
            svg.element("rect", class_="here", width=1, height=1, visibility="hidden"),
            transform=f"translate({left} {top}) scale({wide:.4g} {tall:.4g})",
        )
        inside = (cells, self._values(frame, scale, box), *self._names(box))
        return svg.fitted(left + wide * len(self.columns) + 12, height, self.name, inside)

    def _box(self) -> tuple[float, float, float, float]:
        """Left, top, and the size of a cell."""
        names = [*self.rows, *(name for names in self.row_names for name in names)]
        left = max(
            58,
            22 + 6.6 * max(map(len, names), default=0),
            22 + 6.2 * len(self.words[0]),
            22 + 6.2 * len(self.words[1]),
        )
        wide = min(44.0 if self.square else 60.0, (_WIDTH - left - 8) / max(len(self.columns), 1))
        tall = self.most_tall if len(self.rows) <= 24 else 14.0 if len(self.rows) <= 40 else 12.0
        return round(left), 20, wide, min(24.0, max(wide, 11.0)) if self.square else tall

    def _shades(self, levels: np.ndarray) -> list[Markup]:
        paths = [""] * (LEVELS + 1)
        for down, row in enumerate(levels.tolist()):
            start = 0
            while start < len(row):
                stop = start + 1
                while self.merged and stop < len(row) and row[stop] == row[start]:
                    stop += 1
                if row[start] >= 0:
                    paths[row[start]] += f"M{start} {down}.5h{f'{stop - start - 0.06:.2f}'.lstrip('0')}"
                start = stop
        return [
            svg.path(f"shade s{level}", path)
            for level, path in enumerate(paths)
            if path or len(self.frames) > 1
        ]

    def _split(self) -> Markup:
        """A line between attackers and the others."""
        rows, columns = sum(map(_bad, self.rows)), sum(map(_bad, self.columns))
        down = f"M0 {rows}H{len(self.columns)}" if 0 < rows < len(self.rows) and not self.row_names else ""
        across = f"M{columns} 0V{len(self.rows)}" if 0 < columns < len(self.columns) else ""
        return svg.path("split", down + across) if down or across else Markup()

    def _values(self, frame: np.ndarray, scale: Scale, box: tuple[float, float, float, float]) -> Markup:
        left, top, wide, tall = box
        yes_or_no = len(self.rows) - self.flags
        texts = self.texts or [
            [self._short(value, down >= yes_or_no) for value in row]
            for down, row in enumerate(frame.tolist())
        ]
        letters = max((len(text) for row in texts for text in row), default=0)
        if wide < 6.6 * letters + 4 or tall < 14:
            return Markup()
        levels, out = scale.levels(frame), []
        for down, row in enumerate(texts):
            y = top + tall * (down + 0.5) + 3.6
            for place, text in enumerate(row):
                shade = " bright" if levels[down, place] > _BRIGHT else ""
                if text or len(self.frames) > 1:
                    x = f"{left + wide * (place + 0.5):.0f}"
                    out.append(svg.text(f"count{shade}", x, y, text))
        return svg.group("counts", *out)

    def _short(self, value: float, flag: bool = False) -> str:
        if flag:
            return "" if math.isnan(value) else "✓" if value else "✗"
        if math.isnan(value) or self.share and value < 0.005:
            return ""
        return "∞" if math.isinf(value) else f"{100 * value:.0f}" if self.share else f"{value:.2g}"

    def _names(self, box: tuple[float, float, float, float]) -> list[Markup]:
        left, top, wide, tall = box
        rows, below = self.row_names[-1] if self.row_names else self.rows, top + tall * len(self.rows)
        out = []
        for down, name in enumerate(rows):
            kind = f"tick end whose{' bad' if _bad(name) else ''}"
            out.append(svg.text(kind, left - 8, top + tall * (down + 0.5) + 4, name))
        for place, (name, labelled) in enumerate(zip(self.columns, self._labelled(wide), strict=True)):
            x = left + wide * (place + 0.5)
            if labelled:
                kind = f"tick middle{' bad' if _bad(name) else ''}"
                out.append(svg.text(kind, x, below + 14, name.removeprefix("▲ ")))
            if _bad(name):
                out.append(svg.text("tick middle bad", x, below + 27, "▲"))
        for word, y in ((self.words[0], 12.0), (self.words[1], below + 14)):
            out.append(svg.text("tick end", left - 8, y, word))
        return out

    def _labelled(self, wide: float) -> list[bool]:
        """Which columns have room for their names; of rounds, those with round numbers, and the first."""
        room = (
            7.5 * max((len(name.removeprefix("▲ ")) for name in self.columns), default=1) + 0.3 * wide
        ) / wide
        if self.words[1] != "round" or len(self.columns) < 3:
            return [place % round_step(room) == 0 for place in range(len(self.columns))]
        every = round_step(
            room * (int(self.columns[-2]) - int(self.columns[1])) / max(len(self.columns) - 3, 1)
        )
        return [int(name) % every == 0 or place == 0 for place, name in enumerate(self.columns)]

    def _data(self, scale: Scale) -> Markup:
        """The values as JSON, for the page's script."""
        content: dict[str, object] = {
            "rows": list(self.rows),
            "columns": list(self.columns),
            "words": self.words,
            "box": [round(side, 4) for side in self._box()],
            "low": scale.low,
            "high": scale.high,
            "log": scale.log,
            "share": self.share,
            "frames": [scale.packed(frame) for frame in self.frames],
        }
        if self.rounds:
            content["rounds"] = list(self.rounds)
        if self.row_names:
            content["names"] = [list(names) for names in self.row_names]
        if self.texts:
            content["texts"] = [text for row in self.texts for text in row]
        if self.flags:
            content["flags"] = len(self.rows) - self.flags
        if self.says:
            content["says"] = {f"{down},{place}": text for (down, place), text in self.says.items()}
        return attribute_json(content)

    @property
    def ends(self) -> list[str]:
        """The least and the most that the shades show, in words."""
        scale = self.scale
        return [f"{100 * value:.3g} %" if self.share else f"{value:.3g}" for value in (scale.low, scale.high)]


def _bad(name: str) -> bool:
    return name.startswith("▲")
