"""Maintains the ledger of a federation: the server's key for its heads, and losses that the operator
accepts."""

from __future__ import annotations

import datetime
import os
import shutil
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, RunError
from holdfast.deploy.keys import make_server_key, public_of
from holdfast.deploy.ledger import Ledger
from holdfast.deploy.ledger_check import LedgerCheck
from holdfast.deploy.server_keys import finish_replacement
from holdfast.deploy.signed_head import SIGNING_KEY


def ready_ledger(path: Path, run: Path) -> Ledger:
    """Check and sign the ledger before anything is started or decided: one that is not the newest is refused.
    An older federation without a key gets one, once its ledger is checked."""
    finish_replacement(path)
    found = LedgerCheck(path, run)
    ledger = found.require()
    if not ledger.of("server-key"):
        public = make_server_key(path.parent)
        # Signed first: a ledger that names its key without a signed head is one whose signed head was
        # removed.
        ledger.sign()
        ledger.append("server-key", key=public)
    elif not _has_key(found):
        accept = f"holdfast federation accept-ledger {path.parent.parent} --reason TEXT"
        said = f"{path.with_name(SIGNING_KEY)} is missing or not the key that the ledger names; restore it"
        raise RunError(
            f"{said}, or continue with a new one: `{accept}`, and copy the new server.pub to every node"
        )
    ledger.sign()
    return ledger


def accept_ledger(path: Path, run: Path, reason: str) -> Ledger:
    """Continue with the ledger as it is. The loss and the reason become a permanent entry. Of a damaged file
    the lines before the damage are kept, and a copy of the whole file. After a kill it can be called
    again."""
    found = LedgerCheck(path, run)
    if all(check.good for check in found.examine()) and (_has_key(found) or found.public is None):
        raise ConfigError(
            f"{path} is complete and has all that was signed and committed; there is nothing to accept"
        )
    if "run" in found.problems:
        raise RunError(
            f"{found.problems['run']}; this file belongs to the run: restore it, or move {run} away"
        )
    if found.ledger is None:
        _cut_off_damage(path)
        found = LedgerCheck(path, run)
    ledger, lost = found.ledger, found.claims()
    assert ledger is not None
    what: dict[str, Any] = {"reason": reason, "by": "operator", "lost": lost}
    if found.head is not None:
        what |= {"run": found.run, "model": found.store.digest(found.head.round)}
    public = make_server_key(path.parent)
    if not ledger.of("server-key") or not _has_key(found):
        ledger.append("server-key", key=public)
    ledger.append("reset", None, None if found.head is None else found.head.round, **what)
    ledger.sign(anew=True)
    return ledger


def _has_key(found: LedgerCheck) -> bool:
    """Return whether the key beside the ledger is the one that the ledger names."""
    key = found.path.with_name(SIGNING_KEY)
    return key.exists() and found.names(public_of(key))


def _cut_off_damage(path: Path) -> None:
    """Keep the lines up to the first that does not follow; a copy of the damaged file gets another name."""
    now = datetime.datetime.now(datetime.UTC)
    shutil.copy2(path, path.with_name(f"ledger-damaged-{now:%Y%m%dT%H%M%S}.jsonl"))
    os.truncate(path, Ledger.whole_part(path))
