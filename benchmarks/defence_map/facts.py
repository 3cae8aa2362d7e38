"""What the record says in words, by rules. A defence *keeps* its accuracy under an attack where it loses at
most KEEPS points of what it has without attack, and *falls* where it ends below half of that. A backdoor is
*let through* where it succeeds on more than THROUGH per cent of the images or windows with the trigger, and
*stopped* where it does on fewer than STOPPED."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.defence_map.record import Record

KEEPS, FALLS, THROUGH, STOPPED = 5.0, 0.5, 50.0, 20.0
BACKDOOR, NONE = "backdoor", "none"


@dataclass(frozen=True)
class Outcome:
    """One defence on one dataset: attacks by what became of its accuracy, backdoors by what became of
    them."""

    base: float | None
    keeps: tuple[str, ...]
    loses: tuple[str, ...]
    falls: tuple[str, ...]
    through: tuple[str, ...]
    stopped: tuple[str, ...]
    worst: tuple[float, str] | None

    @property
    def measured(self) -> int:
        return len(self.keeps) + len(self.loses) + len(self.falls)


def keeps(base: float, accuracy: float) -> bool:
    return accuracy >= base - KEEPS


def falls(base: float, accuracy: float) -> bool:
    return accuracy < FALLS * base


def outcome(record: Record, data: str, defence: str) -> Outcome:
    base = record.at(data, defence, NONE).mean
    groups: dict[str, list[str]] = {name: [] for name in ("keeps", "loses", "falls", "through", "stopped")}
    worst: tuple[float, str] | None = None
    for attack in under(record):
        found = record.at(data, defence, attack)
        if base is None or found.mean is None:
            continue
        worst = min(worst or (found.mean, attack), (found.mean, attack))
        name = "keeps" if keeps(base, found.mean) else "falls" if falls(base, found.mean) else "loses"
        groups[name].append(attack)
        if found.fooled is not None and found.fooled > THROUGH:
            groups["through"].append(attack)
        if found.fooled is not None and found.fooled < STOPPED:
            groups["stopped"].append(attack)
    return Outcome(base, **{name: tuple(found) for name, found in groups.items()}, worst=worst)


def under(record: Record, *groups: str) -> list[str]:
    """The attacks of these groups, by default all but none."""
    return [
        name
        for name, about in record.attacks.items()
        if (about["group"] in groups if groups else about["group"] != NONE)
    ]


def seed_spread(record: Record) -> float | None:
    """In half of all cells the seeds differ by no more than this, in points, in what the attack costs the
    defence."""
    spans = []
    for (data, defence, attack), found in record.cells.items():
        base = record.at(data, defence, NONE).accuracy
        if attack != NONE and len(base) == len(found.accuracy) > 1:
            lost = [before - after for before, after in zip(base, found.accuracy, strict=True)]
            spans.append(max(lost) - min(lost))
    return statistics.median(spans) if spans else None


def of_attack(record: Record, data: str, attack: str) -> tuple[list[str], list[str], int]:
    """The defences that keep their accuracy under an attack, those that fall, and how many were measured."""
    kept, fallen, many = [], [], 0
    for defence in record.defences:
        base, found = record.at(data, defence, NONE).mean, record.at(data, defence, attack).mean
        if base is None or found is None:
            continue
        many += 1
        if keeps(base, found):
            kept.append(defence)
        elif falls(base, found):
            fallen.append(defence)
    return kept, fallen, many


def words(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def falling(record: Record) -> str:
    """One line for each defence: what it keeps its accuracy under, on all datasets, and what it falls to."""
    return "\n".join(_line(record, defence) for defence in record.defences)


def _line(record: Record, defence: str) -> str:
    each = {data: outcome(record, data, defence) for data in record.data}
    each = {data: found for data, found in each.items() if found.base is not None}
    if not each:
        return f"* `{defence}`: not measured."
    base = ", ".join(f"{found.base:.0f} on {data}" for data, found in each.items())
    many = max(found.measured for found in each.values())
    said = []
    if many:
        kept, where = _on_all(found.keeps for found in each.values()), _all([*each])
        under_all = len(kept) == many > 1
        said.append(
            f"keeps its accuracy under {'all' if under_all else f'{len(kept)} of'} {many} attacks on {where}"
        )
    said += [
        f"falls below half on {data} under {words(found.falls)}"
        for data, found in each.items()
        if found.falls
    ]
    if not any(found.falls for found in each.values()) and many:
        low = min((found.worst, data) for data, found in each.items() if found.worst)
        said.append(f"never falls below half; its lowest is {low[0][0]:.0f} under `{low[0][1]}` on {low[1]}")
    said += [
        f"lets through on {data} {words(found.through)}" for data, found in each.items() if found.through
    ]
    return f"* `{defence}` ({base} without attack) {'; '.join(said)}."


def _on_all(groups: Iterable[Sequence[str]]) -> list[str]:
    first, *others = groups
    return [name for name in first if all(name in other for other in others)]


def _all(names: Sequence[str]) -> str:
    return (
        names[0] if len(names) == 1 else "both datasets" if len(names) == 2 else f"all {len(names)} datasets"
    )


def attacking(record: Record) -> str:
    """One line for each attack: how many defences keep their accuracy, and which fall."""
    return "\n".join(_of_attack(record, attack) for attack in under(record))


def _of_attack(record: Record, attack: str) -> str:
    said = []
    for data in record.data:
        kept, fallen, many = of_attack(record, data, attack)
        if not many:
            reasons = {record.at(data, defence, attack).note for defence in record.defences} - {""}
            said.append(f"on {data} not measured" + (f" ({min(reasons)})" if reasons else ""))
            continue
        through = [
            defence
            for defence in record.defences
            if (asr := record.at(data, defence, attack).fooled) is not None and asr > THROUGH
        ]
        line = f"on {data} {len(kept)} of {many} keep their accuracy"
        line += f", {len(fallen)} fall below half ({words(fallen)})" if fallen else ", none falls below half"
        if record.attacks[attack]["group"] == BACKDOOR:
            line += f"; it comes through {len(through)} of {many}"
        said.append(line)
    return f"* `{attack}`: {'; '.join(said)}."
