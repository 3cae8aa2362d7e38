"""The result of a page in a sentence or two, with its uncertainty."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.report.attack_effects import attacked, held_or_fell, worst_cases
from holdfast.report.read_runs import RunRecord, SettingRuns
from holdfast.report.settings_by_attack import BENIGN, SettingsByAttack


def verdict(lines: Sequence[SettingRuns], by_attack: SettingsByAttack | None = None) -> tuple[str, str]:
    """The best setting, and a sentence or two about it with its uncertainty."""
    ranked = sorted(
        (line for line in lines if line.mean("accuracy") is not None),
        key=lambda line: -(line.mean("accuracy") or 0.0),
    )
    if not ranked:
        return "Nothing", "was evaluated yet."
    by_attack = by_attack or SettingsByAttack(lines)
    name, said = worst_cases(by_attack.grids) or (
        held_or_fell(lines) if attacked(lines) else _best(ranked, by_attack)
    )
    return name, said + _doubts([record for line in lines for record in line.records])


def _doubts(records: Sequence[RunRecord]) -> str:
    """A sentence about runs that are unfinished, diverged or failed."""
    if len(records) == 1:
        here = records[0]
        told = {
            "begun": f"has finished {here.round} of {here.rounds} rounds",
            "diverged": f"diverged in round {here.run_status.round}",
        }
        return f" It {told[here.run_status.status]}." if here.run_status.status in told else ""
    status = [record.run_status.status.removeprefix("not ") for record in records]
    counts = {word: status.count(word) for word in ("begun", "diverged", "failed")}
    said = [
        f"{n} {word if word != 'begun' else 'is not finished' if n == 1 else 'are not finished'}"
        for word, n in counts.items()
        if n
    ]
    return f" Of {len(records)} runs {', '.join(said)}." if said else ""


def _best(ranked: Sequence[SettingRuns], by_attack: SettingsByAttack) -> tuple[str, str]:
    """The first setting, compared with the next one under the same attack on the same data."""
    first = ranked[0]
    top, low = first.mean("accuracy") or 0.0, first.mean("accuracy/worst10")
    whose, when = (
        ("a client's", "on average")
        if by_attack.met(first)[0] == BENIGN
        else ("a benign client's", "under attack")
    )
    said = f"classifies {100 * top:.1f} % of {whose} test samples correctly {when}"
    tenth = f" The worst tenth of its clients reaches {100 * low:.1f} %." if low is not None else ""
    rivals = [line for line in ranked[1:] if by_attack.met(line) == by_attack.met(first)]
    if not rivals:
        return first.label, f"{said}.{tenth}"
    second = rivals[0]
    gap = top - (second.mean("accuracy") or 0.0)
    noise = max(first.spread("accuracy") or 0.0, second.spread("accuracy") or 0.0)
    doubt = (
        " The gap is within the spread over seeds, so the order may be chance."
        if first.seeds > 1 and gap <= noise
        else ""
    )
    if first.seeds == 1:
        doubt = " There is one seed each, so the order may be chance."
    if not gap:
        return first.label, f"{said}, exactly as {second.label} does.{tenth}{doubt}"
    return first.label, f"{said}, {100 * gap:.1f} points more than {second.label}.{tenth}{doubt}"
