"""Figures for papers: files that matplotlib draws. It comes with the extra `figures`."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.core.files import write_atomically

FORMATS = ("svg", "png", "pdf")
_DOTS_PER_INCH = 200
_STYLE: Any = {
    "text.parse_math": False,  # a dollar sign in a label is not a formula
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#5d6670",
    "axes.labelcolor": "#5d6670",
    "xtick.color": "#5d6670",
    "ytick.color": "#5d6670",
    "grid.color": "#e3e5e2",
    "pdf.fonttype": 42,  # text stays text
    "svg.fonttype": "none",
    "svg.hashsalt": "holdfast",  # the same file for the same figure
}


@dataclass(frozen=True)
class Drawing:
    """One figure: what it shows, its size in inches, and the function that draws it with matplotlib."""

    name: str
    size: tuple[float, float]
    draw: Callable[[Any], None]

    @property
    def file_name(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:60].rstrip("-")


def check_matplotlib() -> None:
    """Refuse to draw where the extra is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "figures need matplotlib, which is not installed; run pip install 'holdfast[figures]'"
        ) from None


def write_drawings(drawings: Sequence[Drawing], path: Path) -> None:
    """Write the figures one above the other as one file; its ending says the format."""
    write_atomically(path, file_content(drawings, path.suffix.lower().removeprefix(".")))


def file_content(drawings: Sequence[Drawing], form: str) -> bytes:
    """The file of one or several figures in one of the formats."""
    figure = figure_of(drawings)
    from matplotlib import rc_context

    with rc_context(_STYLE):
        dates: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        out = io.BytesIO()
        figure.savefig(out, format=form, metadata=dates.get(form))
    return out.getvalue()


def figure_of(drawings: Sequence[Drawing]) -> Any:
    """A matplotlib Figure with the drawings one above the other."""
    check_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        heights = [drawing.size[1] for drawing in drawings]
        size = max(drawing.size[0] for drawing in drawings), sum(heights)
        figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, layout="constrained")
        parts = figure.subfigures(len(drawings), 1, height_ratios=heights, squeeze=False)[:, 0]
        for drawing, part in zip(drawings, parts, strict=True):
            drawing.draw(part)
    return figure
