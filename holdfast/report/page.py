"""One self-contained HTML page about a run or a sweep: no network, no library, light and dark, printable."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

from holdfast.core.files import readable, write_atomically
from holdfast.core.progress import progress
from holdfast.core.version import __version__
from holdfast.report import attack_effects, rounds, sections
from holdfast.report.costs import costs
from holdfast.report.federation_section import federated
from holdfast.report.read_runs import Cell, by_setting, read_cells
from holdfast.report.run_details import inside_each
from holdfast.report.settings_by_attack import Crossing

MOST_TOGETHER = 12  # runs on one page; more of them get a page each

# Nothing may be fetched: a page about private data must not talk to anybody.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


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
    with readable(beside):
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
    cells: Sequence[Cell], title: str | None = None, links: Mapping[Path, str] | None = None, back: str = ""
) -> str:
    """`links` lead to the pages of single runs, where they have some; `back` leads from such a page to the
    one about all."""
    lines = by_setting(cells)
    crossing = Crossing(lines)
    title = title or sections.title(lines, crossing)
    body = [
        sections.headline(lines, crossing),
        rounds.over_rounds(lines, crossing),
        sections.figures(lines, crossing),
        attack_effects.bans(lines, crossing),
        sections.clients(lines, crossing),
        federated(cells),
        inside_each(cells),
        sections.partition(cells),
        costs(lines),
        sections.protocol(lines, crossing),
        sections.runs(cells, links or {}),
        sections.repeat(cells),
    ]
    contents, body = _contents(body)
    skip = '<a class="skip" href="#s1">Skip to the result</a>'
    body = [
        skip,
        back,
        header("report", title, sections.facts(lines)),
        contents,
        *body,
        f"<footer>{escape(_origin(cells))}</footer>",
    ]
    data = rounds.pointed_at(lines, crossing)
    script = (
        '<div id="tip" role="status" hidden></div>\n<script type="application/json"'
        f' id="data">{data}</script>\n'
        f"<script>\n{_resource('page.js')}{_resource('run_details.js')}</script>\n"
    )
    return document(title, body, script)


def render_one(cells: Sequence[Cell], place: int, top: str) -> str:
    """The page of one run of many, beside the pages of the others; `top` leads to the one about all."""
    near = [("previous run", cells[place - 1 : place]), ("next run", cells[place + 1 : place + 2])]
    ways = [(words, quote(f"{one.path.name}.html")) for words, some in near for one in some]
    return render([cells[place]], back=_way_back([(f"all {len(cells)} runs", top), *ways]))


def _way_back(links: Sequence[tuple[str, str]]) -> str:
    return (
        '<nav class="back" aria-label="Other pages">'
        + "".join(f'<a href="{href}">{words}</a>' for words, href in links)
        + "</nav>"
    )


def _contents(body: Sequence[str]) -> tuple[str, list[str]]:
    """Links to the sections, and the sections with the names that the links lead to."""
    titles: list[str] = []

    def named(found: re.Match[str]) -> str:
        titles.append(found[1])
        return f'<section id="s{len(titles)}" tabindex="-1"><h2>{found[1]}</h2>'

    marked = [re.sub(r"<section><h2>(.*?)</h2>", named, part) for part in body]
    links = "".join(f'<a href="#s{place}">{title}</a>' for place, title in enumerate(titles, 1))
    return f'<nav class="contents" aria-label="On this page">{links}</nav>', marked


def header(kind: str, title: str, facts: str) -> str:
    return f'<header><p class="brand">Holdfast {kind}</p><h1>{escape(title)}</h1>{facts}</header>'


def document(title: str, body: Sequence[str], script: str = "") -> str:
    """A whole page around its sections."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_resource('page.css')}{_resource('run_details.css')}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + f"\n</main>\n{script}</body>\n</html>\n"
    )


def _origin(cells: Sequence[Cell]) -> str:
    manifest = cells[0].manifest
    return (
        f"Begun {manifest['began']} with holdfast {manifest['holdfast']}, PyTorch {manifest['torch']}, Python"
        f" {manifest['python']}, device {manifest['device']}, {manifest['threads']} threads. Page by holdfast"
        f" {__version__}."
    )


def _resource(name: str) -> str:
    return (files("holdfast.report") / name).read_text()
