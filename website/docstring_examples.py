"""Examples in docstrings (lines that begin with >>>) become code blocks in the reference."""

from __future__ import annotations

import inspect
from typing import Any

import griffe


def with_fences(docstring: str) -> str:
    """A docstring in which every example, up to the next blank line, is a block of code."""
    lines: list[str] = []
    inside = False
    for line in inspect.cleandoc(docstring).splitlines():
        begins = line.startswith(">>>")
        if begins and not inside:
            lines += ["", "```pycon"]
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join(lines + ["```"] * inside)


class Examples(griffe.Extension):
    """Called for every object that is read for the reference."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            obj.docstring.value = with_fences(obj.docstring.value)
