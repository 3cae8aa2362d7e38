"""The committee over the rounds: its members, their votes on every model, the threshold, and whether a model
passed."""

from __future__ import annotations

import numpy as np
from markupsafe import Markup

from holdfast.report.markup import Section, fill
from holdfast.report.run_data import Frame, RunData
from holdfast.report.shaded_grid import ShadedGrid
from holdfast.report.threshold_chart import against, threshold_drawings
from holdfast.report.timelines import legend, over_rounds, thinned


def committees(run_data: RunData) -> list[Section]:
    names = [
        name.removesuffix("/members")
        for name, sat in run_data.members.items()
        if name.endswith("/members") and any(sat.values())
    ]
    found = [
        _section(run_data, name, f"The committee{f' ({name})' if len(names) > 1 else ''}") for name in names
    ]
    return [section for section in found if section is not None]


def _section(run_data: RunData, name: str, title: str) -> Section | None:
    scores, threshold = run_data.grids.get(f"{name}/accuracy"), run_data.numbers.get(f"{name}/threshold")
    if scores is None:
        return None
    row = {client: place for place, client in enumerate(run_data.clients)}
    sat = run_data.members[f"{name}/members"]
    seats = [
        (row[client], place)
        for place, round in enumerate(run_data.rounds)
        for client in sat.get(round, ())
        if client in row
    ]
    lines = Markup() if threshold is None else against(run_data, scores, threshold, "Score", True)
    drawn = over_rounds(run_data, scores, "The committee's score", True, seats)
    votes, drawings = _votes(run_data, name), []
    if threshold is not None:
        drawings += threshold_drawings(run_data, scores, threshold, "Score", True)
    drawings += [drawn.drawing(), *([votes.drawing()] if votes else [])]
    body = fill(
        "sections/committee.html",
        about=_in_words(run_data, name, sat),
        left_out=thinned(run_data),
        legend=legend(run_data, committee=True),
        lines=lines,
        scores=drawn.html(),
        votes=votes and votes.html(),
    )
    return Section(title, body, drawings)


def _in_words(run_data: RunData, name: str, sat: dict[int, list[int]]) -> str:
    """The members and the share of models that passed, in words."""
    ever = {client for members in sat.values() for client in members}
    seats = max(map(len, sat.values()))
    said = f"{seats} members; {len(ever)} of {run_data.everyone:,} clients were members at some time"
    bad = run_data.malicious
    if ever & bad:
        with_bad = sum(bool(bad & set(members)) for members in sat.values())
        said += f", {len(ever & bad)} of them attackers, in {with_bad} of {len(sat)} rounds"
    passed = run_data.grids.get(f"{name}/admitted")
    if passed is None or not np.isfinite(passed).any():
        return said + "."
    foes, others = (
        grid[np.isfinite(grid)] for grid in (passed[: run_data.attackers], passed[run_data.attackers :])
    )
    if not foes.size or not others.size:
        return f"{said}. Models passed {100 * np.nanmean(passed):.0f} % of the time."
    return (
        f"{said}. Attackers' models passed {100 * foes.mean():.0f} % of the time, those of benign clients"
        f" {100 * others.mean():.0f} %."
    )


def _votes(run_data: RunData, name: str) -> ShadedGrid | None:
    """Members down, models across, and the score and the decision below them."""
    votes = run_data.frames.get(f"{name}/votes", [])
    if not votes:
        return None
    clients, seats = run_data.of_pairs(), max(len(frame.rows) for frame in votes)
    place = {round: i for i, round in enumerate(run_data.rounds)}
    below = [run_data.grids.get(f"{name}/{what}") for what in ("accuracy", "admitted")]
    frames, names = [], []
    for frame in votes:
        values = np.full((seats + 2, len(clients)), np.nan)
        values[: len(frame.rows)] = laid_out(frame, frame.rows.tolist(), clients)
        for down, grid in enumerate(below):
            if grid is not None:
                values[seats + down] = grid[
                    [run_data.clients.index(client) for client in clients], place[frame.round]
                ]
        frames.append(values)
        names.append(
            [
                *(run_data.mark(int(i)) for i in frame.rows),
                *["–"] * (seats - len(frame.rows)),
                "score",
                "passed",
            ]
        )
    return ShadedGrid(
        "Votes of the members",
        names[-1],
        [run_data.mark(client) for client in clients],
        np.stack(frames),
        ("member", "model of"),
        share=True,
        rounds=[frame.round for frame in votes],
        row_names=names,
        square=True,
        flags=1,
    )


def laid_out(frame: Frame, rows: list[int], columns: list[int]) -> np.ndarray:
    """The frame's numbers for these clients; NaN where it has none."""
    down, across = (
        {int(i): place for place, i in enumerate(frame.rows)},
        {int(i): place for place, i in enumerate(frame.columns)},
    )
    out = np.full((len(rows), len(columns)), np.nan)
    for i, one in enumerate(rows):
        for j, other in enumerate(columns):
            if one in down and other in across:
                out[i, j] = frame.values[down[one], across[other]]
    return out
