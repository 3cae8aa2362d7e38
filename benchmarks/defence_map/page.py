"""Writes docs/defences.md from the record: what stands between the marks

    <!-- map: NAME -->
    <!-- end of map -->

is generated, everything else is written by hand."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.defence_map import claims, facts
from benchmarks.defence_map.record import Found, Record
from holdfast.sweeps.grid import flatten

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "defences.md"
TITLES: Mapping[str, tuple[str, ...]] = {
    "Attackers that know only themselves": ("own", "data"),
    "Attackers that know other clients' updates": ("others",),
    "Attackers that know the defence": ("defence",),
    "Backdoors (accuracy / ASR)": ("backdoor",),
}


def write(record: Record, to: Path = PAGE, pictures: Path | None = None) -> None:
    """Write the generated parts and the pictures. A page that does not exist begins as that of docs/."""
    from benchmarks.defence_map.picture import draw

    text = (to if to.exists() else PAGE).read_text()
    to.write_text(updated(text, sections(record)))
    for data in record.data:
        draw(record, data, (pictures or DOCS / "img") / picture_name(data))


def picture_name(data: str) -> str:
    return f"defences-{data}.png"


def updated(text: str, written: Mapping[str, str]) -> str:
    """The page with every section between its marks."""
    for name, content in written.items():
        begin, end = f"<!-- map: {name} -->", "<!-- end of map -->"
        found = re.search(f"{re.escape(begin)}\n.*?{re.escape(end)}", text, re.S)
        if found is None:
            raise SystemExit(f"docs/defences.md has no line '{begin}' with '{end}' after it")
        text = text[: found.start()] + f"{begin}\n{content}\n{end}" + text[found.end() :]
    return text


def sections(record: Record) -> dict[str, str]:
    return {
        "setting": setting(record),
        "tables": "\n\n".join(_of_data(record, data) for data in record.data),
        "detectors": "\n\n".join(
            f"### {data}: detectors\n\n{detectors(record, data)}" for data in record.data
        ),
        "defences": facts.falling(record),
        "attacks": facts.attacking(record),
        "claims": of_claims(record, claims.read()),
        "gaps": gaps(record),
    }


# ---- how it was made


def setting(record: Record) -> str:
    head = record.head
    rows = [
        ("command", f"`{head['command']}`"),
        (
            "date, device",
            f"{head['date']}, {head['device']}, {head['processes']} processes; {head['versions']}",
        ),
        ("method", "`fedavg`; every client takes part in every round"),
        ("training", _settings(head["train"])),
        ("seeds", f"{', '.join(map(str, head['seeds']))}: data, attackers, model, batches"),
        ("server's own data", f"{head['root']} samples, for the parts that need them"),
        ("settings that are not the defaults", _changed(record)),
        *((data, _about(about, record, data)) for data, about in head["data"].items()),
    ]
    spread = facts.seed_spread(record)
    if spread is not None:
        text = f"in half of all cells the seeds differ by at most {spread:.1f} points in what an attack costs"
        rows.append(("seeds apart", text))
    return _table(("", ""), rows, "---")


def _changed(record: Record) -> str:
    """Settings of parts, but for f, and what stands inside and beside."""
    found: dict[str, object] = {}
    for about in record.defences.values():
        rule = about.get("aggregator", {})
        for table in (rule, *rule.get("wrap", ()), *about.get("detectors", ())):
            own = {name: value for name, value in table.items() if name not in ("name", "f", "wrap")}
            found |= {str(table["name"]): own} if own else {}
    for name, about in record.attacks.items():
        own = {key: value for key, value in about.items() if key not in ("group", "knows", "paper")}
        found |= {name: own} if own else {}
    return _settings(found) if found else "none"


def _about(about: Mapping[str, object], record: Record, data: str) -> str:
    cells = sum(len(found.accuracy) for (of, _, _), found in record.cells.items() if of == data)
    settings = _settings({name: about[name] for name in ("data", "model", "train") if name in about})
    return f"{settings}; {cells:,} runs in {_duration(float(str(about['seconds'])))}"


def _settings(table: Mapping[str, object]) -> str:
    return ", ".join(f"`{name} = {json.dumps(value)}`" for name, value in flatten(table).items())


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


# ---- tables


def _of_data(record: Record, data: str) -> str:
    out = [f"## {data}", f"![{data}: accuracy kept and attack success](img/{picture_name(data)})"]
    out += [f"### {data}: summary", summary(record, data)]
    for title, groups in TITLES.items():
        attacks = [name for name in facts.under(record, *groups) if _measured(record, data, name)]
        if attacks:
            out += [f"### {data}: {title[0].lower()}{title[1:]}", accuracy(record, data, attacks)]
    return "\n\n".join(out)


def _measured(record: Record, data: str, attack: str) -> bool:
    return any(record.at(data, defence, attack).accuracy for defence in record.defences)


def summary(record: Record, data: str) -> str:
    """One line for each defence. DAcc, FPR and FNR are means over all attacks, milliseconds the median."""
    rows = []
    for defence in record.defences:
        found = facts.outcome(record, data, defence)
        cells = [record.at(data, defence, attack) for attack in record.attacks]
        rates = [
            _rounded(_mean([rate for cell in cells if (rate := getattr(cell, name)) is not None]))
            for name in ("dacc", "fpr", "fnr")
        ]
        spent = [cell.ms for cell in cells if cell.ms is not None]
        worst = "–" if found.worst is None else f"{found.worst[0]:.0f} (`{found.worst[1]}`)"
        planted = sum(bool(record.at(data, defence, one).asr) for one in facts.under(record, facts.BACKDOOR))
        rows.append(
            (
                f"`{defence}`",
                _rounded(found.base),
                worst,
                f"{len(found.keeps)} / {len(found.falls)} of {found.measured}" if found.measured else "–",
                f"{len(found.stopped)} / {len(found.through)} of {planted}" if planted else "–",
                *rates,
                f"{statistics.median(spent):.1f}" if spent else "–",
            )
        )
    head = (
        "defence",
        "no attack",
        "worst (under)",
        "keeps / falls",
        "backdoors stopped / let through",
        "DAcc",
        "FPR",
        "FNR",
        "ms a round",
    )
    return _table(head, rows)


def accuracy(record: Record, data: str, attacks: Sequence[str]) -> str:
    """Accuracy of defences (down) under attacks (across), in per cent; with ASR after a stroke where an
    attack has a trigger."""
    rows = []
    for defence in record.defences:
        base = record.at(data, defence, facts.NONE).mean
        cells = (_cell(base, record.at(data, defence, attack)) for attack in attacks)
        rows.append((f"`{defence}`", _rounded(base), *cells))
    return _table(("", "no attack", *(f"`{name}`" for name in attacks)), rows)


def _cell(base: float | None, found: Found) -> str:
    if found.mean is None:
        return "–"
    number = _rounded(found.mean)
    if base is not None and facts.falls(base, found.mean):
        number = f"**{number}**"
    return number if found.fooled is None else f"{number} / {_rounded(found.fooled)}"


def detectors(record: Record, data: str) -> str:
    """DAcc / FPR / FNR of detectors beside the mean, in per cent: attacks down, detectors across."""
    names = [name for name, about in record.defences.items() if about["kind"] == "detector"]
    rows = []
    for attack in record.attacks:
        cells = [record.at(data, name, attack) for name in names]
        if any(cell.accuracy for cell in cells):
            rows.append((f"`{attack}`", *map(_rates, cells)))
    return _table(("DAcc / FPR / FNR", *(f"`{record.defences[name]['part']}`" for name in names)), rows)


def _rates(found: Found) -> str:
    if found.fpr is None:
        return "–"
    return f"{_rounded(found.dacc)} / {_rounded(found.fpr)} / {_rounded(found.fnr)}"


def of_claims(record: Record, kept: Sequence[Mapping[str, object]]) -> str:
    """Every claim with what was measured; parts that are not in the record are left out."""
    known = {str(about["part"]) for about in record.defences.values()} | set(record.attacks)
    rows = []
    for claim in sorted(kept, key=lambda claim: str(claim["part"])):
        if claim["part"] not in known:
            continue
        said = [claims.verdict(record, data, claim["check"]) for data in record.data]  # type: ignore[arg-type]
        verdicts = [f"**{one.verdict}**: {one.measured}" if one.measured else one.verdict for one in said]
        if len({*verdicts}) == 1:
            verdicts = [*verdicts[:1], *["the same"] * (len(verdicts) - 1)]
        rows.append((f"`{claim['part']}`", f"{claim['says']} ({claim['paper']})", *verdicts))
    return _table(("part", "claim of the paper", *record.data), rows, "---")


def gaps(record: Record) -> str:
    """What was not measured or ended early, with the reasons, each once."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for (data, defence, attack), cell in record.cells.items():
        if cell.note:
            found.setdefault((data, attack, cell.note), []).append(defence)
    rows = []
    for (data, attack, note), names in found.items():
        who = "all defences" if len(names) == len(record.defences) else facts.words(names)
        rows.append((data, f"`{attack}`", who, note))
    return _table(("dataset", "attack", "defences", "what happened"), rows, "---") if rows else "Nothing."


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _rounded(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], rest: str = "---:") -> str:
    escape: Callable[[str], str] = lambda cell: cell.replace("|", "\\|")  # noqa: E731
    lines = [head, ["---"] + [rest] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(map(escape, line))} |".replace("|  |", "| |") for line in lines)
