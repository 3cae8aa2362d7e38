"""One self-contained HTML page about a run or a sweep: no network, no library, light and dark, printable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from holdfast import __version__
from holdfast.files import write_atomically
from holdfast.report import harm, sections
from holdfast.report.gather import Cell, Line, by_setting, read_cells
from holdfast.report.inside import inside_each

# Nothing may be fetched: a page about private data must not talk to anybody.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_page(folder: Path, out: Path | None = None, title: str | None = None) -> Path:
    """The page of the runs in a folder; gives its path."""
    text = render(read_cells(folder), title)
    target = Path(folder) / "report.html" if out is None else Path(out)
    write_atomically(target, text.encode())
    return target


def render(cells: Sequence[Cell], title: str | None = None) -> str:
    lines = by_setting(cells)
    title = title or sections.title(lines)
    body = [
        header("report", title, sections.facts(lines)),
        sections.headline(lines),
        sections.over_rounds(lines),
        harm.bans(lines),
        sections.clients(lines),
        inside_each(cells),
        sections.partition(cells),
        sections.protocol(lines),
        sections.repeat(cells),
        f"<footer>{escape(_origin(cells))}</footer>",
    ]
    script = (
        f'<div id="tip" role="status" hidden></div>\n<script type="application/json" id="data">{_data(lines)}</script>\n'
        f"<script>\n{_resource('page.js')}{_resource('inside.js')}</script>\n"
    )
    return document(title, body, script)


def header(kind: str, title: str, facts: str) -> str:
    return f'<header><p class="brand">Holdfast {kind}</p><h1>{escape(title)}</h1>{facts}</header>'


def document(title: str, body: Sequence[str], script: str = "") -> str:
    """A whole page around its sections."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_resource('page.css')}{_resource('inside.css')}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + f"\n</main>\n{script}</body>\n</html>\n"
    )


def _data(lines: Sequence[Line]) -> str:
    """What the pointer reads. `<` is written as an escape, so that no label can end the script element."""
    out = {}
    for metric in sections.charted(lines):
        curves = [(line.label, line.curve(metric)) for line in lines]
        out[metric] = [{"label": name, "rounds": [p[0] for p in c], "values": [round(p[1], 5) for p in c]} for name, c in curves]
    return json.dumps(out, separators=(",", ":")).replace("<", "\\u003c")


def _origin(cells: Sequence[Cell]) -> str:
    manifest = cells[0].manifest
    return (
        f"Begun {manifest['began']} with holdfast {manifest['holdfast']}, PyTorch {manifest['torch']}, Python {manifest['python']}, "
        f"device {manifest['device']}, {manifest['threads']} threads. Page by holdfast {__version__}."
    )


def _resource(name: str) -> str:
    return (files("holdfast.report") / name).read_text()
