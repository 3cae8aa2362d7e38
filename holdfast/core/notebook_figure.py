"""Matplotlib figures that a notebook shows, without pyplot: it would keep every figure open."""

from __future__ import annotations

import io
from typing import Any

_ON_SCREEN = 110  # dots per inch in a notebook; files have more


def shown_in_notebooks(figure: Any) -> Any:
    """The same figure; a notebook shows it, in a script call its savefig."""

    def as_png() -> bytes:
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=_ON_SCREEN)
        return out.getvalue()

    figure._repr_png_ = as_png  # matplotlib's own hook is there only once pyplot has been imported
    return figure
