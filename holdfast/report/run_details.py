"""What happened inside a run, for a page: client by client and round by round, as far as the run recorded
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.report.committee import committees
from holdfast.report.markup import Section, fill
from holdfast.report.mixtures import matches, matrices
from holdfast.report.read_runs import RunRecord
from holdfast.report.run_data import read_run_data
from holdfast.report.small_multiples import costs, every_client
from holdfast.report.timelines import timelines

MOST_RUNS = 12
_BUDGET = 3_500_000  # letters: a page stays under 6 MB, and has other things to show


def inside(record: RunRecord) -> list[Section]:
    """All sections about one run; none where nothing was recorded."""
    run_data = read_run_data(record)
    if run_data is None:
        return []
    found = (
        timelines(run_data),
        *committees(run_data),
        *matrices(run_data),
        matches(run_data, record),
        every_client(run_data, str(record.protocol["deployed"])),
        costs(record),
    )
    return [section for section in found if section is not None]


def inside_each(records: Sequence[RunRecord], budget: int = _BUDGET) -> list[Section]:
    """The same for the runs of a page: the sections of a single run, or one section with a closed part for
    each of a few runs. A large sweep has a page for each run."""
    if len(records) == 1:
        return inside(records[0])
    if len(records) > MOST_RUNS:
        return []
    shown, left_out = [], []
    for record in records:
        sections = inside(record)
        letters = sum(len(section.body) for section in sections)
        if letters > budget:
            left_out.append(record.label)
        elif sections:
            shown.append((record.label, sections))
            budget -= letters
    if not shown and not left_out:
        return []
    body = fill("sections/inside_each.html", runs=shown, left_out=left_out)
    drawings = [
        replace(drawing, name=f"{label} {drawing.name}")
        for label, sections in shown
        for section in sections
        for drawing in section.figures
    ]
    return [Section("Details of each run", body, drawings)]
