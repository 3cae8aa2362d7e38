"""Which models each client received: customised mixtures by round, and the peers that a matching server
found."""

from __future__ import annotations

import numpy as np
from markupsafe import Markup

from holdfast.core.errors import HoldfastError
from holdfast.report.class_counts import federation_of
from holdfast.report.committee import laid_out
from holdfast.report.markup import Section, fill
from holdfast.report.read_runs import RunRecord
from holdfast.report.run_data import Frame, RunData
from holdfast.report.shaded_grid import ShadedGrid
from holdfast.report.timelines import thinned

_NOT_WANTED = -1


def matrices(run_data: RunData) -> list[Section]:
    """Sections about customisation, attention and every other recorded matrix with a row per client."""
    found = [
        _matrix(run_data, name, frames)
        for name, frames in run_data.frames.items()
        if run_data.declared.kind(name) != "votes"
    ]
    return [section for section in found if section is not None]


def _matrix(run_data: RunData, name: str, frames: list[Frame]) -> Section | None:
    declared, clients = run_data.declared, run_data.of_pairs()
    of_clients = declared.kind(name) == "mixture"
    present = {
        int(i)
        for frame in frames
        for ids in ((frame.rows, frame.columns) if of_clients else (frame.rows,))
        for i in ids
    }
    clients = [client for client in clients if client in present]
    across = clients if of_clients else list(range(max(len(frame.columns) for frame in frames)))
    values = np.stack([laid_out(frame, clients, across) for frame in frames])
    if not np.isfinite(values).any():
        return None
    title = "Models that each client received" if of_clients else f"Recorded: {name}"
    heads = [run_data.mark(i) for i in across] if of_clients else list(map(str, across))
    grid = ShadedGrid(
        title,
        [run_data.mark(client) for client in clients],
        heads,
        values,
        ("client", "model of" if of_clients else "column"),
        share=declared.share(name),
        rounds=[frame.round for frame in frames],
        square=True,
    )
    words = (
        "A row is a client; its numbers, in per cent, are the shares of the clients' models in the model that"
        " it was sent"
    )
    known = declared.find(name)
    words += f"; {known.note}." if known and known.note else "."
    note = (
        f"{_from_attackers(run_data, frames)} {words}".strip()
        if of_clients
        else declared.about(name)[0].upper() + declared.about(name)[1:] + "."
    )
    few = (
        f" Shown are {len(clients)} of {run_data.everyone:,} clients."
        if len(clients) < run_data.everyone
        else ""
    )
    some = (
        f" The slider has {len(frames)} of {run_data.committed:,} rounds."
        if len(frames) < run_data.committed
        else ""
    )
    drawn = {"legend": legend_of(run_data), "grid": grid.html()}
    return Section(title, fill("sections/matrix.html", note=note + few + some, **drawn), [grid.drawing()])


def legend_of(run_data: RunData) -> Markup:
    """The sign of attackers only: bans are not drawn here."""
    return fill("sections/legend_of_attackers.html", attackers=run_data.attackers)


def _from_attackers(run_data: RunData, frames: list[Frame]) -> str:
    """The share of attackers' models in what benign clients received, in the first and in the last round."""
    said = [
        f"{'less than 0.1' if 0 < frame.foul < 0.001 else f'{100 * frame.foul:.2g}'} % in round {frame.round}"
        for frame in (frames[0], frames[-1])
        if not np.isnan(frame.foul)
    ]
    if not run_data.malicious or not said:
        return ""
    return f"Attackers' models made up {' and '.join(dict.fromkeys(said))} of what benign clients received."


def matches(run_data: RunData, record: RunRecord) -> Section | None:
    """The peers that the server chose for each client, compared with the true partners where the partition
    knows them."""
    if not any((frame.values != _NOT_WANTED).any() for frame in run_data.matches.values()):
        return None
    facts = _facts(record)
    partner, target = facts.get("partner"), facts.get("target")
    clients = run_data.of_pairs()
    peers: Found = {}
    right: dict[tuple[int, int], bool] = {}
    for round, frame in run_data.matches.items():
        peers[round] = {
            int(i): _peers(row, target, int(i)) for i, row in zip(frame.rows, frame.values, strict=True)
        }
        if partner is not None:
            right |= {
                (client, round): set(found) == {int(partner[client])}
                for client, found in peers[round].items()
                if found
            }
    known = partner is not None
    note = f"{sum(right.values()):,} of {len(right):,} decisions name the true partner. " if known else ""
    note += "A number is the client whose personal model was mixed in."
    note += "" if all(right.values()) else " Underlined and pale: not the true partner."
    several = any(len(found) > 1 for now in peers.values() for found in now.values())
    note += " Where a client had several classes, the peers of all are listed." if several else ""
    by_round = _by_round(run_data, clients, peers, right, known)
    how_often = _how_often(run_data, clients, peers, partner)
    body = fill(
        "sections/matches.html",
        note=note + thinned(run_data),
        legend=legend_of(run_data),
        by_round=by_round.html(),
        known=known,
        how_often=how_often.html(),
    )
    return Section("Matched clients", body, [how_often.drawing()])


def _peers(row: np.ndarray, target: np.ndarray | None, client: int) -> list[int]:
    """Of the target class where there is one, else of every class that was wanted."""
    wanted = row[[int(target[client])]] if target is not None and target[client] >= 0 else row
    return [int(peer) for peer in wanted if peer != _NOT_WANTED]


Found = dict[int, dict[int, list[int]]]


def _by_round(
    run_data: RunData, clients: list[int], peers: Found, right: dict[tuple[int, int], bool], known: bool
) -> ShadedGrid:
    shades = np.full((len(clients), len(run_data.rounds)), np.nan)
    texts, says, cut = [[""] * len(run_data.rounds) for _ in clients], {}, ""
    for down, client in enumerate(clients):
        for place, round in enumerate(run_data.rounds):
            found = peers.get(round, {}).get(client)
            if not found:
                continue
            texts[down][place] = ", ".join("none" if peer < 0 else str(peer) for peer in sorted(set(found)))
            shades[down, place] = 0.6 if not known else 1.0 if right[client, round] else 0.25
            if known:
                says[down, place] = "right" if right[client, round] else "wrong"
                cut += "" if right[client, round] else f"M{place}.1 {down}.86h.74"
    rows, columns = [run_data.mark(client) for client in clients], list(map(str, run_data.rounds))
    marks = [("m cut", cut)] if cut else []
    return ShadedGrid(
        "Peers by client and round",
        rows,
        columns,
        shades[None],
        texts=texts,
        says=says,
        marks=marks,
        legend=False,
        top=1.6,
        most_tall=22.0,
    )


def _how_often(run_data: RunData, clients: list[int], peers: Found, partner: np.ndarray | None) -> ShadedGrid:
    place = {client: i for i, client in enumerate(clients)}
    counts = np.zeros((len(clients), len(clients)))
    for now in peers.values():
        for client, found in now.items():
            for peer in found:
                if client in place and peer in place:
                    counts[place[client], place[peer]] += 1
    frames = (
        ""
        if partner is None
        else "".join(
            f"M{place[int(partner[c])]} {place[c]}.03h.94v.94h-.94z"
            for c in clients
            if int(partner[c]) in place
        )
    )
    names = [run_data.mark(client) for client in clients]
    texts = [[f"{n:.0f}" if n else "" for n in row] for row in counts]
    marks = [("m true", frames)] if frames else []
    title = "How often each client received each other's model"
    return ShadedGrid(
        title, names, names, counts[None], ("client", "model of"), square=True, texts=texts, marks=marks
    )


def _facts(record: RunRecord) -> dict[str, np.ndarray]:
    """What the partition knows of its clients; empty where the data cannot be read."""
    try:
        return {name: value.numpy() for name, value in federation_of(record.run.data_config).facts.items()}
    except HoldfastError:
        return {}
