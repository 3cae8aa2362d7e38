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
from holdfast.report.read_runs import Cell, by_setting, read_cells
from holdfast.report.run_details import inside_each
from holdfast.report.settings_by_attack import Crossing
from holdfast.report.verdict import verdict

MOST_TOGETHER = 12  # runs on one page; more of them get a page each


def write_page(folder: Path, out: Path | None = None, title: str | None = None, alone: bool = False) -> Path:
    """The page of the runs in a folder; gives its path. More than a few runs get a page each too, in a folder
    beside it that has its name, unless it is to be `alone`."""
    cells = read_cells(folder)
    target = Path(folder) / "report.html" if out is None else Path(out)
    if alone or len(cells) <= MOST_TOGETHER:
        write_atomically(target, render(cells, title).encode(errors="replace"))
        return target
    names = {cell.path: f"{cell.path.name}.html" for cell in cells}
    beside = target.with_suffix("")
    if (
        beside == target or (beside / "manifest.json").exists()
    ):  # the page has no suffix, or a run has the name
        beside = target.with_name(f"{target.name}-runs")
    with plain_disk_errors(beside):
        beside.mkdir(parents=True, exist_ok=True)
    with progress("pages of the runs", len(cells) + 1) as advance:
        links = {path: f"{quote(beside.name)}/{quote(name)}" for path, name in names.items()}
        write_atomically(target, render(cells, title, links).encode(errors="replace"))
        advance(1)
        for place, cell in enumerate(cells):
            write_atomically(
                beside / names[cell.path],
                render_one(cells, place, f"../{quote(target.name)}").encode(errors="replace"),
            )
            advance(1)
    return target


def render(
    cells: Sequence[Cell],
    title: str | None = None,
    links: Mapping[Path, str] | None = None,
    back: Sequence[tuple[str, str]] = (),
    live: Markup | None = None,
) -> str:
    """The page about these runs. `links` lead to the pages of single runs, where they have some; `back` are
    words and links from such a page to others. `live` is the state of a page that asks for news."""
    lines = by_setting(cells)
    crossing = Crossing(lines)
    name, said = verdict(lines, crossing)
    return whole_page(
        "report.html",
        title=title or sections.title(lines, crossing),
        facts=sections.facts(lines),
        back=back,
        best=name,
        said=said,
        sections=all_sections(cells, links),
        footer=_origin(cells),
        data=rounds.pointed_at(lines, crossing),
        live=live,
    )


def all_sections(cells: Sequence[Cell], links: Mapping[Path, str] | None = None) -> list[Section]:
    """The sections of the page about these runs, in order."""
    lines = by_setting(cells)
    crossing = Crossing(lines)
    found = [
        headline(lines, crossing),
        rounds.over_rounds(lines, crossing),
        figures(lines, crossing),
        attack_effects.bans(lines, crossing),
        sections.clients(lines, crossing),
        federated(cells),
        *inside_each(cells),
        sections.partition(cells),
        costs(lines),
        protocol(lines, crossing),
        sections.runs(cells, links or {}),
        sections.repeat(cells),
    ]
    return [section for section in found if section is not None]


def render_one(cells: Sequence[Cell], place: int, top: str, live: Markup | None = None) -> str:
    """The page of one run of many, beside the pages of the others; `top` leads to the page about all."""
    near = [("previous run", cells[place - 1 : place]), ("next run", cells[place + 1 : place + 2])]
    ways = [(words, quote(f"{one.path.name}.html")) for words, some in near for one in some]
    return render([cells[place]], back=[(f"all {len(cells)} runs", top), *ways], live=live)


def _origin(cells: Sequence[Cell]) -> str:
    manifest = cells[0].manifest
    return (
        f"Begun {manifest['began']} with holdfast {manifest['holdfast']}, PyTorch {manifest['torch']}, Python"
        f" {manifest['python']}, device {manifest['device']}, {manifest['threads']} threads. Page by holdfast"
        f" {__version__}."
    )
