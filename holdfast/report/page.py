"""One self-contained HTML page about a run or a sweep: no network, no library, light and dark, printable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from holdfast.core.files import plain_disk_errors, write_atomically
from holdfast.core.progress import progress
from holdfast.core.version import __version__
from holdfast.report import attack_effects, rounds, sections
from holdfast.report.costs import costs
from holdfast.report.federation_section import federated
from holdfast.report.figures_section import figures, headline
from holdfast.report.markup import Section, whole_page
from holdfast.report.protocol import protocol
from holdfast.report.read_runs import RunRecord, by_setting, read_records
from holdfast.report.run_details import inside_each
from holdfast.report.settings_by_attack import SettingsByAttack
from holdfast.report.tuning_section import trials
from holdfast.report.verdict import verdict

MOST_TOGETHER = 12  # runs on one page; more of them get a page each


def write_page(folder: Path, out: Path | None = None, title: str | None = None, alone: bool = False) -> Path:
    """The page of the runs in a folder; gives its path. More than a few runs get a page each too, in a folder
    beside it that has its name, unless it is to be `alone`."""
    records = read_records(folder)
    target = Path(folder) / "report.html" if out is None else Path(out)
    if alone or len(records) <= MOST_TOGETHER:
        write_atomically(target, render(records, title).encode(errors="replace"))
        return target
    names = {record.path: f"{record.path.name}.html" for record in records}
    beside = target.with_suffix("")
    if beside == target or any((beside / name).exists() for name in ("manifest.json", "sweep.json")):
        # the page has no suffix, or a run or a sweep has the name
        beside = target.with_name(f"{target.name}-runs")
    with plain_disk_errors(beside):
        beside.mkdir(parents=True, exist_ok=True)
    with progress("pages of the runs", len(records) + 1) as advance:
        links = {path: f"{quote(beside.name)}/{quote(name)}" for path, name in names.items()}
        write_atomically(target, render(records, title, links).encode(errors="replace"))
        advance(1)
        for place, record in enumerate(records):
            write_atomically(
                beside / names[record.path],
                render_one(records, place, f"../{quote(target.name)}").encode(errors="replace"),
            )
            advance(1)
    return target


def render(
    records: Sequence[RunRecord],
    title: str | None = None,
    links: Mapping[Path, str] | None = None,
    back: Sequence[tuple[str, str]] = (),
    live: Markup | None = None,
) -> str:
    """The page about these runs. `links` lead to the pages of single runs, where they have some; `back` are
    words and links from such a page to others. `live` is the state of a page that asks for news."""
    lines = by_setting(records)
    by_attack = SettingsByAttack(lines)
    name, said = verdict(lines, by_attack)
    return whole_page(
        "report.html",
        title=title or sections.title(lines, by_attack),
        facts=sections.facts(lines),
        back=back,
        best=name,
        said=said,
        sections=all_sections(records, links),
        footer=_origin(records),
        data=rounds.pointed_at(lines, by_attack),
        live=live,
    )


def all_sections(records: Sequence[RunRecord], links: Mapping[Path, str] | None = None) -> list[Section]:
    """The sections of the page about these runs, in order."""
    lines = by_setting(records)
    by_attack = SettingsByAttack(lines)
    found = [
        headline(lines, by_attack),
        rounds.over_rounds(lines, by_attack),
        figures(lines, by_attack),
        trials(records),
        attack_effects.bans(lines, by_attack),
        sections.clients(lines, by_attack),
        federated(records),
        *inside_each(records),
        sections.partition(records),
        costs(lines),
        protocol(lines, by_attack),
        sections.runs(records, links or {}),
        sections.repeat(records),
    ]
    return [section for section in found if section is not None]


def render_one(records: Sequence[RunRecord], place: int, top: str, live: Markup | None = None) -> str:
    """The page of one run of many, beside the pages of the others; `top` leads to the page about all."""
    near = [("previous run", records[place - 1 : place]), ("next run", records[place + 1 : place + 2])]
    ways = [(words, quote(f"{one.path.name}.html")) for words, some in near for one in some]
    return render([records[place]], back=[(f"all {len(records)} runs", top), *ways], live=live)


def _origin(records: Sequence[RunRecord]) -> str:
    manifest = records[0].manifest
    return (
        f"Begun {manifest['began']} with holdfast {manifest['holdfast']}, PyTorch {manifest['torch']}, Python"
        f" {manifest['python']}, device {manifest['device']}, {manifest['threads']} threads. Page by holdfast"
        f" {__version__}."
    )
