"""Entries of the ledger as lines for the operator."""

from __future__ import annotations

import re

from holdfast.deploy.ledger import Entry

_ERROR = re.compile(r"^error \d+: <class '[\w.]+'>:<.")


def line_of(entry: Entry) -> str:
    """Return the line that `up` prints for an entry; an empty one for entries that need none."""
    who, what = f"client {entry.client}", entry.what
    where = "" if entry.round is None else f" in round {entry.round}"
    if entry.kind == "round":
        accuracy = what.get("accuracy")
        measured = f", accuracy {accuracy:.3f}" if accuracy is not None else ""
        refused = f", {len(what['refused'])} refused" if what.get("refused") else ""
        return f"round {entry.round}: {len(what.get('took_part', []))} took part{refused}{measured}"
    return {
        "start": "the run starts",
        "resume": f"the run continues after round {entry.round}",
        "ban": f"{who} is banned{where}: {what.get('reason')}",
        "unban": f"{who} is no longer banned: {what.get('reason')}",
        "strike": f"{who}, round {entry.round}: {what.get('reason')}",
        "enrol": f"{who} is enrolled",
        "rotate": f"{who} has a new key",
        "stranger": f"rejected an unauthenticated node: {what.get('reason')}",
        "finish": "the run is finished",
        "server-key": "the server has a new key for orders" if what.get("signature") else "",
        "leave": f"{who} has left",
        "wait": (
            f"round {entry.round}: waiting up to {what.get('seconds', 0):g} s for more clients;"
            f" {what.get('answered')} answered; missing: {_each(what.get('clients', {}))}"
        ),
        "reset": f"the operator has accepted that a part of the ledger is lost: {what.get('reason')}",
        "pause": (
            f"{who} missed several deadlines in a row and is not asked before round {what.get('until')}"
        ),
        "suspect": f"{who}, round {entry.round}: {what.get('reason')}",
        "missing": f"round {entry.round}: no answer from {_each(what.get('clients', {}))}",
    }.get(entry.kind, "")


def _each(clients: dict[str, str]) -> str:
    """Clients and reasons. Flower names the class of an error before it, and explains it after a dash, at
    length: the log has both."""
    return "; ".join(
        f"client {client} ({_ERROR.sub('', reason).partition(' — ')[0][:120]})"
        for client, reason in clients.items()
    )
