"""Draws which package of Holdfast imports which: docs/img/packages.svg, in docs/design.md.

    python benchmarks/import_graph.py            # write the picture
    python benchmarks/import_graph.py --check    # exit with 1 if the picture is not up to date

The imports are read from the code with grimp, which import-linter uses too. A package stands below all
packages that import it. An arrow is left out where a longer way of arrows leads to the same package."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import grimp

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "img" / "packages.svg"
Imports = dict[str, set[str]]

ENTRY, RESULTS, RUNNING, PARTS, BASE = "#e8e8ee", "#dcebf7", "#fdeccd", "#dff2e1", "#eeeeee"
ABOUT = {
    "cli": ("the commands", ENTRY),
    "api": ("holdfast from Python", ENTRY),
    "bench": ("timings of steps and rounds", ENTRY),
    "demo": ("the demonstration", ENTRY),
    "interactive": ("runs in notebooks", RESULTS),
    "reproduction": ("tables of papers", RESULTS),
    "tuning": ("fair comparisons", RESULTS),
    "diagnostics": ("questions to a finished run", RESULTS),
    "report": ("tables, pages, charts", RESULTS),
    "results": ("runs as data frames", RESULTS),
    "deploy": ("federations on Flower", RUNNING),
    "tracking": ("TensorBoard, MLflow, W&B", RUNNING),
    "forecast": ("what a run will cost", RUNNING),
    "sweeps": ("grids of experiments", RUNNING),
    "experiment": ("config and the round loop", RUNNING),
    "engine": ("answers exchanges", RUNNING),
    "storage": ("what a run saves", RUNNING),
    "methods": ("client and server halves", PARTS),
    "attacks": ("what attackers send", PARTS),
    "detectors": ("which clients are malicious", PARTS),
    "wrappers": ("aggregator to aggregator", PARTS),
    "aggregators": ("many updates to one", PARTS),
    "server_optimizers": ("from aggregate to step", PARTS),
    "evaluation": ("scores and metrics", PARTS),
    "local": ("local training, plans", PARTS),
    "models": ("networks", PARTS),
    "data": ("sources and partitions", PARTS),
    "privacy": ("clipping, noise, epsilon", BASE),
    "core": ("records, keys, registry, files", BASE),
}
LEGEND = (
    ("entry points", ENTRY),
    ("results", RESULTS),
    ("running experiments", RUNNING),
    ("parts of an experiment", PARTS),
)

WIDTH, BOX, LINE, ROW, GAP = 900, 42, 14, 84, 26  # pixels: picture, box height, way of a long arrow, row, gap


def imports_of(package: str = "holdfast") -> Imports:
    """Return, for each package inside `package`, the others that it imports at run time."""
    graph = grimp.build_graph(package, cache_dir=None, exclude_type_checking_imports=True)
    # __main__ is the command line, started another way
    inside = [m for m in graph.modules if "." in m and m.split(".")[1] != "__main__"]
    found: Imports = {module.split(".")[1]: set() for module in inside}
    for module in inside:
        for imported in graph.find_modules_directly_imported_by(module):
            if "." in imported and imported.split(".")[1] != module.split(".")[1]:
                found[module.split(".")[1]].add(imported.split(".")[1])
    return found


def reduced(imports: Imports) -> Imports:
    """Return the imports without those that a longer way implies."""

    @cache
    def reached(package: str) -> frozenset[str]:
        return frozenset().union(*({other} | reached(other) for other in imports[package]))

    return {
        package: {o for o in others if not any(o in reached(c) for c in others if c != o)}
        for package, others in imports.items()
    }


@dataclass
class Node:
    """A package, or a point on the way of an arrow that crosses a row."""

    name: str
    row: int
    above: list[Node] = field(default_factory=list)
    below: list[Node] = field(default_factory=list)
    x: float = 0.0

    @property
    def is_package(self) -> bool:
        return self.name != ""

    @property
    def width(self) -> float:
        return max(96.0, 6.1 * len(ABOUT[self.name][0]) + 18) if self.is_package else LINE


def rows_of(imports: Imports) -> list[list[Node]]:
    """Return the rows from top to bottom, with a point in every row that a long arrow crosses."""

    @cache
    def depth(package: str) -> int:
        return 1 + max((depth(other) for other in imports[package]), default=-1)

    top = max(map(depth, imports))
    nodes = {package: Node(package, top - depth(package)) for package in sorted(imports)}
    rows: list[list[Node]] = [[] for _ in range(top + 1)]
    for node in nodes.values():
        rows[node.row].append(node)
    for package, others in sorted(reduced(imports).items()):
        for other in sorted(others):
            last = nodes[package]
            for row in range(last.row + 1, nodes[other].row + 1):
                point = nodes[other] if row == nodes[other].row else Node("", row)
                if not point.is_package:
                    rows[row].append(point)
                last.below.append(point)
                point.above.append(last)
                last = point
    _order(rows)
    return rows


def _order(rows: list[list[Node]], sweeps: int = 24) -> None:
    """Sort each row by the mean position of its neighbours, downwards and upwards in turn; then place it."""
    for row in rows:
        _spread(row)
    for sweep in range(sweeps):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            wanted = {id(n): _mean(n.above if down else n.below, n.x) for n in row}
            row.sort(key=lambda n: wanted[id(n)])
            _spread(row)
    for _ in range(40):  # straighten the arrows without changing the order
        for row in rows:
            for place, node in enumerate(row):
                left = row[place - 1].x + _distance(row[place - 1], node) if place else node.width / 2 + 8
                right = WIDTH - node.width / 2 - 8
                if place + 1 < len(row):
                    right = row[place + 1].x - _distance(node, row[place + 1])
                node.x = min(max(_mean(node.above + node.below, node.x), left), max(left, right))


def _mean(nodes: list[Node], otherwise: float) -> float:
    return sum(node.x for node in nodes) / len(nodes) if nodes else otherwise


def _distance(left: Node, right: Node) -> float:
    return (left.width + right.width) / 2 + (GAP if left.is_package or right.is_package else 0)


def _spread(row: list[Node]) -> None:
    """Place a row next to each other, in the middle of the picture."""
    total = sum(_distance(a, b) for a, b in zip(row, row[1:], strict=False))
    x = (WIDTH - total) / 2
    for place, node in enumerate(row):
        x += _distance(row[place - 1], node) if place else 0
        node.x = x


def draw(rows: list[list[Node]]) -> str:
    """Return the picture as SVG."""
    height = ROW * len(rows) + 40
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}" font-family="Helvetica, Arial, sans-serif" role="img">',
        "<title>The packages of Holdfast: each imports only packages below it</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
        ' orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#8a8f98"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    packages = [node for row in rows for node in row if node.is_package]
    for node in packages:
        out += [_arrow(node, first) for first in node.below]
    for node in packages:
        about, colour = ABOUT[node.name]
        x, y = node.x, _top(node)
        out.append(
            f'<rect x="{x - node.width / 2:.1f}" y="{y}" width="{node.width:.1f}" height="{BOX}" rx="6"'
            f' fill="{colour}" stroke="#6b7280"/>'
        )
        out.append(
            f'<text x="{x:.1f}" y="{y + 18}" text-anchor="middle" font-size="14" font-weight="bold"'
            f' fill="#111827">{node.name}</text>'
        )
        out.append(
            f'<text x="{x:.1f}" y="{y + 33}" text-anchor="middle" font-size="11"'
            f' fill="#374151">{about.replace("&", "&amp;")}</text>'
        )
    for place, (words, colour) in enumerate(LEGEND):
        y = height - 22 * (len(LEGEND) - place) - 8
        out.append(f'<rect x="16" y="{y}" width="14" height="14" rx="3" fill="{colour}" stroke="#6b7280"/>')
        out.append(f'<text x="36" y="{y + 11}" font-size="12" fill="#374151">{words}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _top(node: Node) -> float:
    return 20 + ROW * node.row


def _arrow(node: Node, first: Node) -> str:
    x, y = node.x, _top(node) + BOX
    path = f"M{x:.1f} {y}"
    point = first
    while True:
        end = _top(point)
        bend = (end - y) / 2
        path += f" C{x:.1f} {y + bend:.1f} {point.x:.1f} {end - bend:.1f} {point.x:.1f} {end}"
        if point.is_package:
            return (
                f'<path d="{path}" fill="none" stroke="#8a8f98" stroke-width="1.3" marker-end="url(#tip)"/>'
            )
        path += f" V{end + BOX}"
        x, y, point = point.x, end + BOX, point.below[0]


def picture() -> str:
    """Return the picture of the packages as they are now."""
    imports = imports_of()
    if different := imports.keys() ^ ABOUT.keys():
        raise SystemExit(
            f"ABOUT in {Path(__file__).name} does not match the packages: {', '.join(sorted(different))}"
        )
    return draw(rows_of(imports))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if the picture is not up to date")
    asked, now = parser.parse_args(), picture()
    if not asked.check:
        PICTURE.parent.mkdir(exist_ok=True)
        PICTURE.write_text(now)
    elif not PICTURE.exists() or PICTURE.read_text() != now:
        sys.exit(f"{PICTURE} is not up to date: run python benchmarks/import_graph.py")


if __name__ == "__main__":
    main()
