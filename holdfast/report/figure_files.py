"""The charts of a page as files of their own: SVG that carries its style with it, and PNG drawn by a
browser."""

from __future__ import annotations

import re
import tempfile
from html import unescape
from pathlib import Path

from holdfast.core.errors import ConfigError
from holdfast.core.files import write_atomically
from holdfast.core.progress import progress
from holdfast.report.browser import MISSING, Browser, find_browser

FORMATS = ("svg", "png")
_SCALE, _EDGE = (
    2,
    12,
)  # dots of a PNG per point, sharp on dense screens and on paper; white points around a chart
_ACROSS = 8  # of small charts, as on paper
_FONT = 'font-family:system-ui,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif;font-size:12.5px'

_OF_PAGES = re.compile(r"(min-|max-)?(width|height):|display: (block|grid)|grid-|gap:")


def write_figures(page: str, folder: Path, form: str = "svg") -> list[Path]:
    """Every chart of a rendered page, numbered in its order; gives their paths."""
    if form not in FORMATS:
        raise ConfigError(f"--format: there is {' and '.join(FORMATS)}, not {form}")
    if form == "png" and find_browser() is None:
        raise ConfigError(f"--format png: {MISSING}; --format svg needs none")
    drawn = figures(page)
    if not drawn:
        raise ConfigError("--figures: this page has tables and no charts; --tables csv writes them")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--figures {folder}: cannot be made: {error.strerror}") from None
    contents = drawn.items() if form == "svg" else _photographed(drawn).items()
    for name, content in contents:
        write_atomically(
            folder / f"{name}.{form}",
            content.encode(errors="replace") if isinstance(content, str) else content,
        )
    return [folder / f"{name}.{form}" for name in drawn]


def figures(page: str) -> dict[str, str]:
    """Standalone SVG texts by name."""
    style = "".join(re.findall(r"<style>(.*?)</style>", page, re.S))
    out = {}
    for place, chart in enumerate(
        re.findall(r'<svg class="chart.*?</svg>|<div class="many">.*?</div>', page, re.S), 1
    ):
        chart = _together(chart) if chart.startswith("<div") else chart
        about = re.search(r'aria-label="([^"]*)"', chart)
        words = re.sub(r"[^a-z0-9]+", "-", unescape(about[1]).lower()).strip("-") if about else "chart"
        out[f"{place:02d}-{words[:60].rstrip('-')}"] = standalone(chart, style)
    return out


def _together(many: str) -> str:
    """Small charts, one for each client, as one: beside each other as on the page, with the frames that the
    page's style gives them."""
    small = re.findall(
        r'<svg class="(\w+)" viewBox="0 0 (\d+) (\d+)" role="img" aria-label="[^"]*">(.*?)</svg>', many, re.S
    )
    wide, high = (max(int(one[side]) for one in small) for side in (1, 2))
    across = min(len(small), _ACROSS)
    drawn = []
    for place, (kind, _, _, inside) in enumerate(small):
        x, y = (wide + _EDGE) * (place % across), (high + _EDGE) * (place // across)
        frame = f'<rect class="frame {kind}" x="0.5" y="0.5" width="{wide - 1}" height="{high - 1}" rx="6"/>'
        drawn.append(f'<g class="{kind}" transform="translate({x} {y})">{frame}{inside}</g>')
    size = f"{(wide + _EDGE) * across - _EDGE} {(high + _EDGE) * -(-len(small) // across) - _EDGE}"
    return (
        f'<svg class="many" viewBox="0 0 {size}" role="img" aria-label="every client over the'
        f' rounds">{"".join(drawn)}</svg>'
    )


def standalone(chart: str, style: str) -> str:
    """A chart in the light colours of its page, on white, with the rules that concern it."""
    opening, inside = chart.split(">", 1)
    kind, about = re.search(r'class="([^"]*)"', opening), re.search(r'aria-label="[^"]*"', opening)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', opening)
    if kind is None or box is None:
        raise ValueError(f"a chart without a class or a viewBox from 0 0: {opening}")
    wide, high = (float(side) + 2 * _EDGE for side in box.groups())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind[1]}" width="{wide:g}" height="{high:g}" '
        f'viewBox="{-_EDGE} {-_EDGE} {wide:g} {high:g}" role="img" {about[0] if about else ""}>'
        f"<style>svg{{{_FONT}}}{_rules(style, chart)}</style>"
        f'<rect x="{-_EDGE}" y="{-_EDGE}" width="{wide:g}" height="{high:g}" fill="#ffffff"/>{inside}\n'
    )


def _rules(style: str, chart: str) -> str:
    """Of a page's style what this chart uses, every variable replaced by its value, because few programs
    beside browsers know variables. How large things are on a page, and what a pointer does to them, is left
    behind."""
    style = re.sub(
        r"@media[^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}", "", re.sub(r"/\*.*?\*/", "", style, flags=re.S)
    )
    known = dict(re.findall(r"(--[\w-]+):\s*([^;}]+)", style))
    used = {word for found in re.findall(r'class="([^"]*)"', chart) for word in found.split()}
    out = []
    for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", style):
        kept = [one.strip() for one in selectors.split(",") if _concerns(one, used)]
        lines = [
            line.strip() for line in body.split(";") if line.strip() and not _OF_PAGES.match(line.strip())
        ]
        if kept and lines:
            out.append(f"{','.join(kept)}{{{';'.join(lines)}}}")
    return re.sub(r"var\((--[\w-]+)\)", lambda found: known[found[1]].strip(), "".join(out))


def _concerns(selector: str, used: set[str]) -> bool:
    classes = set(re.findall(r"\.([\w-]+)", selector))
    return bool(classes) and classes <= used and not re.search(r"[:#\[]", selector)


def _photographed(drawn: dict[str, str]) -> dict[str, bytes]:
    out = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        Browser() as browser,
        progress("figures", len(drawn)) as advance,
    ):
        for name, svg in drawn.items():
            file = Path(folder) / f"{name}.svg"
            file.write_text(svg)
            wide, high = (float(side) for side in re.findall(r'(?:width|height)="([\d.]+)"', svg)[:2])
            browser.resize(int(wide), int(high), _SCALE)
            browser.open(file)
            out[name] = browser.picture((0, 0, wide, high))
            advance(1)
    return out
