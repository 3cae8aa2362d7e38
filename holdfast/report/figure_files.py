"""The charts of a page as files for papers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from holdfast.core.errors import ConfigError
from holdfast.core.files import write_atomically
from holdfast.core.progress import progress
from holdfast.report.drawing import FORMATS, check_matplotlib, file_content
from holdfast.report.markup import Section


def write_figures(sections: Sequence[Section], folder: Path, form: str = "svg") -> list[Path]:
    """Write every chart of these sections, numbered in the order of the page; return the paths."""
    if form not in FORMATS:
        raise ConfigError(f"--format: choose {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, not {form}")
    drawings = [drawing for section in sections for drawing in section.figures]
    if not drawings:
        raise ConfigError("--figures: this page has tables and no charts; --tables csv writes them")
    check_matplotlib()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--figures {folder}: cannot be made: {error.strerror}") from None
    paths = []
    with progress("figures", len(drawings)) as advance:
        for place, drawing in enumerate(drawings, 1):
            paths.append(folder / f"{place:02d}-{drawing.file_name}.{form}")
            write_atomically(paths[-1], file_content([drawing], form))
            advance(1)
    return paths
