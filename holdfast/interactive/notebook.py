"""HTML for notebooks: small tables of facts, and bars that need no widgets."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape
from rich.progress import Task
from rich.text import Text

from holdfast.core.errors import in_print

_PAUSE = 0.25  # seconds between two updates of the bars
_MOST_LINES = 8  # said lines that stay below the bars


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook (Jupyter, Colab, VS Code)."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def facts_table(facts: Mapping[str, Any]) -> str:
    """A table of names and values, without a header."""
    rows = (
        Markup('<tr><th style="text-align:left">{}</th><td style="text-align:left">{}</td></tr>').format(
            name, value
        )
        for name, value in facts.items()
    )
    return str(Markup("<table>{}</table>").format(Markup("").join(rows)))


def rows_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]], note: str = "") -> str:
    """A table with a header, below a title and above a note."""

    def line(cells: Sequence[Any], tag: str) -> Markup:
        cell = Markup(f'<{tag} style="text-align:left">{{}}</{tag}>')
        return Markup("<tr>{}</tr>").format(Markup("").join(cell.format(value) for value in cells))

    body = Markup("").join(line(row, "td") for row in rows)
    below = Markup("<p>{}</p>").format(note) if note else Markup("")
    return str(
        Markup("<p>{}</p><table><thead>{}</thead><tbody>{}</tbody></table>{}").format(
            title, line(heads, "th"), body, below
        )
    )


class NotebookBars:
    """One output of a cell that shows all bars and is replaced as they move."""

    def __init__(self, most_lines: int = _MOST_LINES) -> None:
        self.most_lines = most_lines
        self.lines: list[str] = []
        self.tasks: Sequence[Task] = ()
        self._output: Any = None
        self._shown = 0.0

    def say(self, line: str) -> None:
        self.lines = [*self.lines, in_print(line)][-self.most_lines :]
        self.show(self.tasks, at_once=True)

    def show(self, tasks: Sequence[Task], at_once: bool = False) -> None:
        self.tasks = tasks
        if not at_once and time.monotonic() - self._shown < _PAUSE:
            return
        self._shown = time.monotonic()
        from IPython.display import display

        if self._output is None:
            self._output = display(self, display_id=True)
        else:
            self._output.update(self)

    def _repr_html_(self) -> str:
        bars = Markup("").join(_bar(task) for task in self.tasks)
        said = Markup("<br>").join(escape(line) for line in self.lines)
        return str(
            Markup('<table>{}</table><div style="color:#777;font-size:smaller">{}</div>').format(bars, said)
        )

    def __repr__(self) -> str:
        said = [f"{_words(task.description)} {task.completed:g}/{task.total:g}" for task in self.tasks]
        return "\n".join([*said, *self.lines])


def _bar(task: Task) -> Markup:
    left = task.time_remaining
    return Markup(
        '<tr><td style="text-align:left">{}</td><td><progress value="{}" max="{}"></progress></td>'
        "<td>{}/{}</td><td>{}</td><td>{}</td></tr>"
    ).format(
        _words(task.description),
        f"{task.completed:g}",
        f"{task.total:g}",
        f"{task.completed:g}",
        f"{task.total:g}",
        task.fields.get("figure", ""),
        "" if not left else f"{left:.0f} s left",
    )


def _words(description: str) -> str:
    """A description without its markup."""
    return Text.from_markup(description).plain
