"""Runs that differ in a setting and whose figures are equal to the last bit: the setting had no effect, or
something ignores it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from holdfast.report.config_differences import differing
from holdfast.report.read_runs import RunRecord

_HOW = ("engine.", "evaluate.")  # where and how a run is computed and measured may well change nothing


def without_effect(records: Sequence[RunRecord]) -> list[str]:
    """A sentence for each setting, or set of settings, in which finished runs differ although all figures of
    all rounds are the same."""
    alike: dict[str, list[RunRecord]] = {}
    for record in records:
        if record.run_status.status == "finished" and record.curve("accuracy"):
            alike.setdefault(
                json.dumps([part["metrics"] for part in record.parts], sort_keys=True), []
            ).append(record)
    found: dict[tuple[str, ...], list[list[RunRecord]]] = {}
    for group in alike.values():
        names = tuple(
            name for name in differing([record.config for record in group]) if not name.startswith(_HOW)
        )
        if names:
            found.setdefault(names, []).append(group)
    return [_sentence(names, groups) for names, groups in found.items()]


def _sentence(names: tuple[str, ...], groups: list[list[RunRecord]]) -> str:
    first = groups[0]
    also = f" (and {len(groups) - 1} more such groups)" if len(groups) > 1 else ""
    labels = ", ".join(record.label for record in first[:4]) + (
        f" and {len(first) - 4} more" if len(first) > 4 else ""
    )
    return (
        f"{' and '.join(names)} made no difference: {labels}{also} differ in it, but all their figures in all"
        " rounds are equal to the last bit. Either the setting has no effect here, or the code does not"
        " use it."
    )
