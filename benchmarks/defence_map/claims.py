"""The papers' claims beside what was measured. benchmarks/records/defence-claims.toml is kept by hand: a
part, its paper, what that claims in one line, and how the map bears on it. Whether it holds here is computed.

    [[claim]]
    part = "krum"
    paper = "Blanchard et al., NeurIPS 2017"
    says = "Gaussian updates of 33 % of the workers cost it next to nothing."
    check = { kind = "keeps", defence = "krum", attacks = ["gaussian"], points = 5 }

| kind | holds where |
|---|---|
| keeps | the defence loses at most `points` (5) of its accuracy without attack under each of `attacks` |
| falls | it ends below `share` (0.5) of that under each of them |
| loses | it loses more than `points` (5) under each of them |
| beats | its accuracy is at least that of the defence `than` plus `points` (-2) under each of them |
| harder | its accuracy is lower than under the attack `than`, by more than `points` (0), under each of them |
| asr-below, asr-above | the ASR is below, above `value` under each of them |
| asr-beats | the ASR is at least that of the attack `than` plus `points` (-2) under each of them |
| detects | DAcc is at least `value`, and FPR at most `fpr` (100), under each of them |
| untested | never: `reason` says why this scale says nothing about it |

What holds for some of the attacks or defences of a claim holds in part."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.defence_map.facts import NONE
from benchmarks.defence_map.record import RECORDS, Found, Record

FILE = RECORDS / "defence-claims.toml"
HOLDS, PARTLY, FAILS, UNTESTED = "holds", "holds in part", "does not hold", "not tested"


class Verdict(NamedTuple):
    """Of one claim on one dataset."""

    verdict: str
    measured: str = ""


Checked = tuple[bool, str] | None
"""Whether a claim holds under one attack, and the numbers; None where they were not measured."""


def read(path: Path = FILE) -> list[dict[str, Any]]:
    return tomllib.loads(path.read_text())["claim"]


def verdict(record: Record, data: str, check: Mapping[str, Any]) -> Verdict:
    """Whether a claim holds on a dataset: under each of its attacks, and for each of its defences."""
    if check["kind"] == "untested":
        return Verdict(UNTESTED, check["reason"])
    test, pairs = KINDS[check["kind"]], _pairs(record, check)
    found = [(defence, attack, test(record, data, defence, attack, check)) for defence, attack in pairs]
    known = [(defence, attack, checked) for defence, attack, checked in found if checked is not None]
    if not known or len(known) < len(found):
        gone = sorted({attack for _, attack, checked in found if checked is None})
        return Verdict(UNTESTED, f"not measured: {', '.join(gone)}" if gone else "no such attack here")
    held = [checked[0] for _, _, checked in known]
    partly = any(held) and not all(held)
    several = len(check.get("defences", ())) > 1
    said = "; ".join(
        f"{f'{defence}, ' if several else ''}{attack}: {checked[1]}"
        + (f", {'yes' if checked[0] else 'no'}" if partly else "")
        for defence, attack, checked in known
    )
    return Verdict(PARTLY if partly else HOLDS if all(held) else FAILS, said)


def _pairs(record: Record, check: Mapping[str, Any]) -> list[tuple[str, str]]:
    """`attacks` may name a group in place of attacks, as "group:backdoor"."""
    named: list[str] = []
    for name in check["attacks"]:
        group = name.removeprefix("group:")
        named += (
            [name]
            if group == name
            else [attack for attack, about in record.attacks.items() if about["group"] == group]
        )
    defences: Sequence[str] = check.get("defences") or [check["defence"]]
    return [(defence, attack) for defence in defences for attack in named]


def _against_none(holds: Callable[[float, float, Mapping[str, Any]], bool]) -> Callable[..., Checked]:
    def test(record: Record, data: str, defence: str, attack: str, check: Mapping[str, Any]) -> Checked:
        base, found = record.at(data, defence, NONE).mean, record.at(data, defence, attack).mean
        if base is None or found is None:
            return None
        return holds(base, found, check), f"{found:.0f} of {base:.0f}"

    return test


def _against_other(by_attack: bool) -> Callable[..., Checked]:
    """Compare with another defence under the same attack, or with another attack on the same defence."""

    def test(record: Record, data: str, defence: str, attack: str, check: Mapping[str, Any]) -> Checked:
        than, points = check["than"], check.get("points", 0.0 if by_attack else -2.0)
        found = record.at(data, defence, attack).mean
        other = record.at(data, *((defence, than) if by_attack else (than, attack))).mean
        if found is None or other is None:
            return None
        holds = found < other - points if by_attack else found >= other + points
        return holds, f"{found:.0f}, {'under ' if by_attack else ''}`{than}` {other:.0f}"

    return test


def _of_figure(figure: Callable[[Found, Mapping[str, Any]], Checked]) -> Callable[..., Checked]:
    def test(record: Record, data: str, defence: str, attack: str, check: Mapping[str, Any]) -> Checked:
        return figure(record.at(data, defence, attack), check)

    return test


def _asr(above: bool) -> Callable[[Found, Mapping[str, Any]], Checked]:
    def figure(found: Found, check: Mapping[str, Any]) -> Checked:
        if found.fooled is None:
            return None
        holds = found.fooled > check["value"] if above else found.fooled < check["value"]
        return holds, f"ASR {found.fooled:.0f}"

    return figure


def _asr_beats(record: Record, data: str, defence: str, attack: str, check: Mapping[str, Any]) -> Checked:
    found = record.at(data, defence, attack).fooled
    other = record.at(data, defence, check["than"]).fooled
    if found is None or other is None:
        return None
    return found >= other + check.get("points", -2.0), f"ASR {found:.0f}, of `{check['than']}` {other:.0f}"


def _detects(found: Found, check: Mapping[str, Any]) -> Checked:
    if found.dacc is None or found.fpr is None:
        return None
    holds = found.dacc >= check["value"] and found.fpr <= check.get("fpr", 100.0)
    return holds, f"DAcc {found.dacc:.0f}, FPR {found.fpr:.0f}"


KINDS: Mapping[str, Callable[..., Checked]] = {
    "keeps": _against_none(lambda base, found, check: found >= base - check.get("points", 5.0)),
    "loses": _against_none(lambda base, found, check: found < base - check.get("points", 5.0)),
    "falls": _against_none(lambda base, found, check: found < check.get("share", 0.5) * base),
    "beats": _against_other(by_attack=False),
    "harder": _against_other(by_attack=True),
    "asr-below": _of_figure(_asr(above=False)),
    "asr-above": _of_figure(_asr(above=True)),
    "asr-beats": _asr_beats,
    "detects": _of_figure(_detects),
}
