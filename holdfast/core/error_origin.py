"""Whose code an error comes from: a plug-in's or the caller's own, or Holdfast's and its libraries'."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from holdfast.core.registry import PLUGIN, registering_packages

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_LIBRARIES = tuple(
    {sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_NOTE = "__holdfast_place__"


class Place(NamedTuple):
    """A line of code: its file and number."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}, in {self.function}"

    @property
    def short(self) -> str:
        return f"{Path(self.file).name}, line {self.line}"


def place_of(error: BaseException) -> Place | None:
    """The innermost line outside Holdfast that an error came through; for an error raised from another one,
    the place of that one."""
    noted = getattr(error, _NOTE, None)
    if noted is not None:
        return Place(*noted)
    found, trace = None, error.__traceback__
    while trace is not None:
        if _outside_holdfast(trace.tb_frame):
            found = Place(trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    return found if found is not None or error.__cause__ is None else place_of(error.__cause__)


def note_place(error: BaseException, place: tuple[str, int, str] | None) -> None:
    """Attach the place to an error from another process, whose traceback is not sent."""
    setattr(error, _NOTE, place)


def in_brackets(error: BaseException) -> str:
    """' (mine.py, line 12)', or nothing where the error is Holdfast's own."""
    place = place_of(error)
    return f" ({place.short})" if place is not None else ""


def _outside_holdfast(frame: FrameType) -> bool:
    module, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
    if module.startswith(PLUGIN):
        return True
    if module.partition(".")[0] == "holdfast" or file.startswith(_PACKAGE):
        return False
    if file.startswith("<"):  # generated, or typed in
        return module == "__main__" and not file.startswith("<frozen")
    return not file.startswith(_LIBRARIES) or module.partition(".")[0] in registering_packages()
