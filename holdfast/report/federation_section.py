"""What the ledger of a federation says beside the run: who was there, who was not and why, strikes, bans,
strangers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.core.errors import RunError
from holdfast.deploy.ledger import Entry, Ledger
from holdfast.report.markup import Section, fill
from holdfast.report.read_runs import RunRecord

_MARKS = {"here": "●", "missing": "○", "refused": "✗", "banned": "■", "away": "·"}
_MOST_ROUNDS = 120


def federated(records: Sequence[RunRecord]) -> Section | None:
    """The ledger of the federation; None where the run was simulated."""
    if len(records) != 1 or not (records[0].path.parent / "ledger.jsonl").exists():
        return None
    try:
        ledger = Ledger(records[0].path.parent / "ledger.jsonl")
    except RunError as error:
        return Section("The federation", fill("sections/no_ledger.html", error=str(error)))
    entries, label = ledger.entries, records[0].manifest["label"]
    clients = sorted(
        {entry.client for entry in entries if entry.kind == "enrol" and entry.client is not None}
    )
    rounds = [entry for entry in entries if entry.kind == "round" and entry.what.get("run") == label]
    begin = next((i for i, entry in enumerate(entries) if entry.what.get("run") == label), 0)
    body = fill(
        "sections/federation.html",
        marks=_MARKS,
        cut=_MOST_ROUNDS if len(rounds) > _MOST_ROUNDS else 0,
        entries=len(entries),
        head=ledger.head,
        rows=[_row(client, rounds[-_MOST_ROUNDS:], entries, entries[begin:]) for client in clients],
        **_events(entries[begin:]),
    )
    return Section("The federation", body)


def _row(
    client: int, rounds: Sequence[Entry], entries: Sequence[Entry], since: Sequence[Entry]
) -> dict[str, Any]:
    mine = [entry for entry in entries if entry.client == client]
    judged = [entry for entry in mine if entry.kind in ("ban", "unban")]
    ban = judged[-1] if judged and judged[-1].kind == "ban" else None
    missing = {
        entry.round
        for entry in since
        if entry.kind == "missing" and str(client) in entry.what.get("clients", {})
    }
    struck = [entry for entry in since if entry.kind == "strike" and entry.client == client]
    kinds = [_kind(client, entry, missing, {entry.round for entry in struck}, ban) for entry in rounds]
    when = f"in round {ban.round}: " if ban is not None and ban.round is not None else ""
    return {
        "client": client,
        "marks": "".join(_MARKS[kind] for kind in kinds),
        "counts": ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)),
        "strikes": f"{len(struck)}: {struck[-1].what.get('reason', '')}" if struck else "none",
        "ban": "" if ban is None else f"{when}{ban.what.get('reason', '')} (by {ban.what.get('by', '?')})",
    }


def _kind(
    client: int, entry: Entry, missing: set[int | None], struck: set[int | None], ban: Entry | None
) -> str:
    if entry.round in struck:
        return "refused"
    if client in entry.what.get("took_part", []):
        return "here"
    if ban is not None and (ban.round is None or (entry.round or 0) >= ban.round):
        return "banned"
    return "missing" if entry.round in missing else "away"


def _events(entries: Sequence[Entry], most: int = 50) -> dict[str, Any]:
    """What happened besides ordinary rounds, the newest last, and how many such events there are."""
    found = [entry for entry in entries if entry.kind not in ("round", "missing", "finish")]
    lines = []
    for entry in found[-most:]:
        who = f"client {entry.client}" if entry.client is not None else ""
        when = f"round {entry.round}" if entry.round is not None else ""
        reason = f": {entry.what['reason']}" if entry.what.get("reason") else ""
        lines.append((entry.at, " ".join(filter(None, (entry.kind, who, when))) + reason))
    return {"events": lines, "event_count": len(found)}
