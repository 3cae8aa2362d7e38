"""What the server saw of every client in every round, and what it made of it: fields of client and round, and
lines against a threshold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from holdfast.report.drawing import Drawing
from holdfast.report.markup import Section, fill
from holdfast.report.run_data import MOST_CLIENTS, MOST_ROUNDS, RunData
from holdfast.report.shaded_grid import ShadedGrid
from holdfast.report.threshold_chart import against, threshold_drawings

_MOST_FIELDS = 8


def timelines(run_data: RunData) -> Section | None:
    """The section about all clients and rounds, without the committee, which has its own."""
    fields = _fields(run_data)
    if not fields and not run_data.banned and not run_data.rejected:
        return None
    shown = dict(list(fields.items())[:_MOST_FIELDS])
    parts = [_field(run_data, name, grid) for name, grid in shown.items()]
    left_out = (
        f" {len(fields) - len(shown)} more tables: see holdfast diagnose." if len(shown) < len(fields) else ""
    )
    body = fill(
        "sections/timelines.html",
        decided=_decided(run_data),
        left_out=thinned(run_data) + left_out,
        legend=legend(run_data),
        fields=[field for field, _ in parts],
    )
    return Section("Clients by round", body, [drawing for _, drawings in parts for drawing in drawings])


def _fields(run_data: RunData) -> dict[str, np.ndarray]:
    """What is worth a field: not what has a section of its own, and nothing twice: lengths are a detector's
    scores too."""
    found: dict[str, np.ndarray] = {}
    first = ["weights", *run_data.declared.titled()]
    for name in sorted(
        run_data.grids, key=lambda name: (first.index(name) if name in first else len(first), name)
    ):
        grid, declared = run_data.grids[name], run_data.declared.find(name)
        if (
            np.isfinite(grid).any()
            and not (declared and declared.section)
            and not any(_same(grid, other) for other in found.values())
        ):
            found[name] = grid
    return found


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.allclose(one, other, equal_nan=True))


def _field(run_data: RunData, name: str, grid: np.ndarray) -> tuple[Markup, list[Drawing]]:
    share, known = run_data.declared.share(name), grid[np.isfinite(grid)]
    title, about = run_data.declared.title(name), run_data.declared.about(name)
    constant, note, drawn, drawings = "", "", Markup(), []
    if np.ptp(known) < 1e-9:
        constant = f"{100 * known[0]:.3g} %" if share else f"{known[0]:.4g}"
    else:
        note = _typical(run_data, grid, share) if run_data.bad.any() else ""
        bound = _bound(run_data, name)
        if bound is not None:
            drawn += against(run_data, grid, bound, title, share)
            drawings += threshold_drawings(run_data, grid, bound, title, share)
        field = over_rounds(run_data, grid, title, share)
        drawn += field.html()
        drawings.append(field.drawing())
    values = {"title": title, "about": about, "constant": constant, "note": note, "drawn": drawn}
    return fill("sections/field.html", **values), drawings


def _typical(run_data: RunData, grid: np.ndarray, share: bool) -> str:
    """Typical values of attackers and of benign clients. Of shares the mean, because most of them may be
    0."""
    said = []
    for kind, rows in (("attackers", run_data.bad), ("benign clients", ~run_data.bad)):
        values = grid[rows & np.isfinite(grid)]
        if values.size:
            said.append(
                f"{100 * values.mean():.3g} % for {kind}" if share else f"{np.median(values):.3g} for {kind}"
            )
    return f"{'On average' if share else 'Median'} {' and '.join(said)}." if said else ""


def _bound(run_data: RunData, name: str) -> np.ndarray | None:
    if name != "norms":
        return run_data.numbers.get(f"{name}/bound")
    same = (
        other
        for other in run_data.grids
        if f"{other}/bound" in run_data.numbers and _same(run_data.grids[other], run_data.grids["norms"])
    )
    return next((run_data.numbers[f"{other}/bound"] for other in same), None)


def over_rounds(
    run_data: RunData, grid: np.ndarray, title: str, share: bool, seats: Sequence[tuple[int, int]] = ()
) -> ShadedGrid:
    """Clients down, rounds across, with the server's decisions above the shades."""
    says = {place: "on the committee" for place in seats}
    row, column = (
        {client: i for i, client in enumerate(run_data.clients)},
        {round: i for i, round in enumerate(run_data.rounds)},
    )
    away = sorted(
        (row[client], column[round])
        for client, round in run_data.rejected
        if client in row and round in column
    )
    says |= dict.fromkeys(away, "rejected")
    last = len(run_data.rounds) - 1
    bans = {
        (row[client], min(int(np.searchsorted(run_data.rounds, when)), last)): (when, why)
        for client, (when, why) in run_data.banned.items()
        if client in row
    }
    says |= {place: f"banned in round {when}: {why}" for place, (when, why) in bans.items()}
    foes = [(down, place) for down, place in np.argwhere(run_data.bad).tolist()] if run_data.redrawn else []
    says |= {place: " and ".join(filter(None, ("attacks", says.get(place)))) for place in foes}
    half = min(
        1.0, 5 / min(60.0, 1050 / (last + 1))
    )  # of a cross, in cells, so that it is about as wide as it is high
    cross = "".join(
        f"M{place + 0.5 - half:.3f} {down}.22l{2 * half:.3f} .56m0 -.56l-{2 * half:.3f} .56"
        for down, place in bans
    )
    marks = (
        ("m gone", "".join(f"M{place + 1} {down}.5H{last + 1}" for down, place in bans if place < last)),
        ("m foe", "".join(f"M{place} {down}h.5L{place} {down}.5z" for down, place in foes)),
        ("m cut", "".join(f"M{place}.1 {down}.85h.74" for down, place in away)),
        ("m seat", "".join(f"M{place}.12 {down}.2h.7v.6h-.7z" for down, place in seats)),
        ("m ban", cross),
    )
    return ShadedGrid(
        f"{title} by client and round",
        [run_data.mark(client) for client in run_data.clients],
        list(map(str, run_data.rounds)),
        grid[None],
        share=share,
        marks=[mark for mark in marks if mark[1]],
        says=says,
        crosses=list(bans),
        merged=True,
    )


def _decided(run_data: RunData) -> str:
    """Bans and rejections in a sentence."""
    said = []
    if run_data.banned:
        rightly = sum(client in run_data.malicious for client in run_data.banned)
        who = f", {rightly} of them attackers" if run_data.malicious else ""
        first = min(when for when, _ in run_data.banned.values())
        said.append(
            f"{_many(len(run_data.banned), 'client was', 'clients were')} banned{who}, the first in round"
            f" {first}."
        )
    if run_data.rejected:
        said.append(f"{_many(len(run_data.rejected), 'update was', 'updates were')} rejected for a round.")
    return " ".join(said) or "No client was banned or rejected."


def _many(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"


def thinned(run_data: RunData) -> str:
    """What is not shown."""
    few = (
        f" Shown are {len(run_data.clients)} of {run_data.everyone:,} clients, attackers and suspects before"
        " others."
    )
    some = f" Shown are {len(run_data.rounds)} of {run_data.committed:,} rounds."
    return (few if run_data.everyone > MOST_CLIENTS else "") + (
        some if run_data.committed > MOST_ROUNDS else ""
    )


def legend(run_data: RunData, committee: bool = False) -> Markup:
    """The signs that there are, with their meanings."""
    return fill("sections/legend.html", run_data=run_data, committee=committee)
