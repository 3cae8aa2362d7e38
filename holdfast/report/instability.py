"""Runs whose training diverged, or came close to it, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.report.read_runs import RunRecord
from holdfast.results.run import name_of

HIGH = 20.0  # a training loss that no sensible start has: guessing among 1,000 classes has 6.9


def advice(config: dict[str, Any]) -> str:
    """What to change after a run diverged.

    >>> advice({"attack": None, "train": {"lr": 5.0}})
    'lower train.lr (now 5)'
    """
    lower = f"lower train.lr (now {config['train']['lr']:g})"
    if config["attack"] is None:
        return lower
    attack = name_of(config["attack"])
    return f"use a robust aggregator or method against {attack}; if it also diverges without attack, {lower}"


def unstable(records: Sequence[RunRecord]) -> list[str]:
    """A sentence about finished runs whose training loss was very high in some round. Figures stayed finite,
    so they do not count as diverged. Runs under attack are left out: there the attack does this."""
    found = [(record, peak) for record in records if (peak := _peak(record)) is not None]
    if not found:
        return []
    record, (round, loss) = found[0]
    who = "" if len(records) == 1 else f"{record.label}: "
    more = f" {len(found) - 1} more such." if len(found) > 1 else ""
    return [
        f"{who}the training loss reached {loss:,.0f} in round {round}, so training is unstable;"
        f" {advice(record.config)}.{more}"
    ]


def _peak(record: RunRecord) -> tuple[int, float] | None:
    """The round with the highest training loss, where that is too high."""
    if record.run_status.status != "finished" or record.config["attack"] is not None:
        return None
    round, loss = max(record.curve("loss/train"), key=lambda point: point[1], default=(0, 0.0))
    return (round, loss) if loss > HIGH else None
