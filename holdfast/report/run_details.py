"""What happened inside a run, for a page: client by client and round by round, as far as the run recorded
it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from holdfast.report.committee import committees
from holdfast.report.mixtures import matches, matrices
from holdfast.report.read_runs import Cell
from holdfast.report.run_data import read
from holdfast.report.small_multiples import costs, every_client
from holdfast.report.timelines import timelines

MOST_CELLS = 12
_BUDGET = 3_500_000  # letters: a page stays under 6 MB, and has other things to show


def inside(cell: Cell) -> str:
    """All sections about one run; empty where nothing was recorded."""
    story = read(cell)
    if story is None:
        return ""
    return "".join(
        (
            timelines(story),
            committees(story),
            matrices(story),
            matches(story, cell),
            every_client(story, str(cell.protocol["deployed"])),
            costs(cell),
        )
    )


def inside_each(cells: Sequence[Cell], budget: int = _BUDGET) -> str:
    """The same for the runs of a page: of one run as it is, of a few one below the other, closed. A large
    sweep has a page for each."""
    if len(cells) == 1:
        return inside(cells[0])
    if len(cells) > MOST_CELLS:
        return ""
    out, left_out = [], []
    for cell in cells:
        text = inside(cell)
        if len(text) > budget:
            left_out.append(cell.label)
        elif text:
            text = text.replace(
                "<section>", '<section class="within">'
            )  # no card in a card, and nothing for a table of contents
            out.append(f'<details class="inside"><summary>{escape(cell.label)}</summary>{text}</details>')
            budget -= len(text)
    if left_out:
        out.append(
            '<p class="note">For the size of this page, not shown: the inside of'
            f" {escape(', '.join(left_out))}. `holdfast report` with the folder of one run shows it.</p>"
        )
    note = (
        "Client by client, as far as it was recorded: what the server saw and decided, who got what of whom,"
        " what each client had of it."
    )
    return (
        f'<section><h2>Inside each run</h2><p class="note">{note}</p>{"".join(out)}</section>' if out else ""
    )
