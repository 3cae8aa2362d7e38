"""What the ledger of a federation says beside the run: who was there, who was not and why, strikes, bans,
strangers."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from holdfast.core.errors import RunError
from holdfast.deploy.ledger import Entry, Ledger
from holdfast.report.read_runs import Cell

_MARKS = {"here": "●", "missing": "○", "refused": "✗", "banned": "■", "away": "·"}
_MOST_ROUNDS = 120


def federated(cells: Sequence[Cell]) -> str:
    """Nothing where the run was simulated."""
    if len(cells) != 1 or not (cells[0].path.parent / "ledger.jsonl").exists():
        return ""
    try:
        ledger = Ledger(cells[0].path.parent / "ledger.jsonl")
    except RunError as error:
        return f'<section><h2>The federation</h2><p class="note">{escape(str(error))}</p></section>'
    entries = ledger.entries
    clients = sorted(
        {entry.client for entry in entries if entry.kind == "enrol" and entry.client is not None}
    )
    rounds = [
        entry
        for entry in entries
        if entry.kind == "round" and entry.what.get("run") == cells[0].manifest["label"]
    ]
    begin = next(
        (i for i, entry in enumerate(entries) if entry.what.get("run") == cells[0].manifest["label"]), 0
    )
    rows = "".join(_row(client, rounds[-_MOST_ROUNDS:], entries, entries[begin:]) for client in clients)
    legend = ", ".join(
        f"{_MARKS[kind]} {words}"
        for kind, words in (
            ("here", "took part"),
            ("missing", "asked, no answer"),
            ("refused", "refused"),
            ("away", "not asked"),
            ("banned", "banned"),
        )
    )
    cut = f" The last {_MOST_ROUNDS} rounds." if len(rounds) > _MOST_ROUNDS else ""
    return (
        f'<section><h2>The federation</h2><p class="note">Who was there, round by round: {legend}.{cut} From'
        " the ledger: "
        f"{len(entries)} entries, every line follows the one before; head <code>{ledger.head}</code>.</p>"
        '<div class="scroll"><table'
        ' class="words"><thead><tr><th>client</th><th>rounds</th><th>strikes</th><th>banned</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{_events(entries[begin:])}</section>"
    )


def _row(client: int, rounds: Sequence[Entry], entries: Sequence[Entry], since: Sequence[Entry]) -> str:
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
    marks = "".join(_MARKS[kind] for kind in kinds)
    spoken = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    when = f"in round {ban.round}: " if ban is not None and ban.round is not None else ""
    why = "" if ban is None else f"{when}{ban.what.get('reason', '')} (by {ban.what.get('by', '?')})"
    faults = f"{len(struck)}: {struck[-1].what.get('reason', '')}" if struck else "none"
    return (
        f'<tr><th scope="row">{client}</th><td><span role="img" aria-label="{escape(spoken)}"'
        f' title="{escape(spoken)}">{marks}</span></td><td>{escape(faults)}</td><td>{escape(why)}</td></tr>'
    )


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


def _events(entries: Sequence[Entry], most: int = 50) -> str:
    """What happened besides ordinary rounds, the newest last."""
    told = [entry for entry in entries if entry.kind not in ("round", "missing", "finish")]
    lines = []
    for entry in told[-most:]:
        who = f"client {entry.client}" if entry.client is not None else ""
        when = f"round {entry.round}" if entry.round is not None else ""
        said = " ".join(filter(None, (entry.kind, who, when)))
        reason = f": {entry.what['reason']}" if entry.what.get("reason") else ""
        lines.append(f"<li><time>{escape(entry.at)}</time> {escape(said + reason)}</li>")
    return (
        f"<details><summary>Events ({len(told)})</summary><ul>{''.join(lines)}</ul></details>"
        if lines
        else ""
    )
