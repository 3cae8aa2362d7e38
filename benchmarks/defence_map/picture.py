"""A map as a picture: defences down, attacks across, coloured by the accuracy that is kept; beside it how
often backdoors succeed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.defence_map import facts
from benchmarks.defence_map.axes import GROUPS
from benchmarks.defence_map.record import Record

_CELL = 0.27  # inches


def draw(record: Record, data: str, path: Path) -> None:
    """Write the picture of one dataset; needs matplotlib."""
    from matplotlib.figure import Figure

    attacks = [
        name
        for group in GROUPS
        for name in record.attacks
        if record.attacks[name]["group"] == group and _any(record, data, name)
    ]
    planted = [name for name in attacks if any(record.at(data, one, name).asr for one in record.defences)]
    rows = list(record.defences)
    wide = _CELL * (len(attacks) + len(planted))
    figure = Figure(figsize=(wide + 4.2, _CELL * len(rows) + 2.2), layout="constrained")
    widths = [len(attacks), max(1, len(planted))] if planted else [1]
    axes = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    kept = [[_kept(record, data, row, attack) for attack in attacks] for row in rows]
    _panel(axes[0], kept, rows, attacks, "RdYlBu", f"{data}: accuracy in % (colour: share kept)")
    _separate(axes[0], [record.attacks[name]["group"] for name in attacks])
    if planted:
        fooled = [[_fooled(record, data, row, attack) for attack in planted] for row in rows]
        _panel(axes[1], fooled, [""] * len(rows), planted, "RdYlBu_r", "ASR in %")
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)  # a third of the bytes


Shade = tuple[float, str] | None
"""A colour from 0 to 1, and the number that is written into the cell."""


def _any(record: Record, data: str, attack: str) -> bool:
    return any(record.at(data, defence, attack).accuracy for defence in record.defences)


def _kept(record: Record, data: str, defence: str, attack: str) -> Shade:
    base, found = record.at(data, defence, facts.NONE).mean, record.at(data, defence, attack).mean
    if base is None or found is None:
        return None
    return min(1.0, found / base if base else 0.0), f"{found:.0f}"


def _fooled(record: Record, data: str, defence: str, attack: str) -> Shade:
    asr = record.at(data, defence, attack).fooled
    return None if asr is None else (asr / 100, f"{asr:.0f}")


def _panel(
    axis: Any,
    cells: Sequence[Sequence[Shade]],
    down: Sequence[str],
    across: Sequence[str],
    map: str,
    title: str,
) -> None:
    colours = [[float("nan") if cell is None else cell[0] for cell in row] for row in cells]
    axis.imshow(colours, cmap=map, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    for y, row in enumerate(cells):
        for x, cell in enumerate(row):
            if cell is not None:
                ink = "white" if cell[0] < 0.15 or cell[0] > 0.9 else "black"
                axis.text(x, y, cell[1], ha="center", va="center", fontsize=7, color=ink)
    axis.set_xticks(range(len(across)), across, rotation=90, fontsize=8)
    axis.set_yticks(range(len(down)), down, fontsize=8)
    axis.tick_params(length=0, labeltop=False)
    axis.set_title(title, fontsize=10)
    for side in axis.spines.values():
        side.set_visible(False)


def _separate(axis: Any, groups: Sequence[str]) -> None:
    """White lines between groups of attacks."""
    for place in range(1, len(groups)):
        if groups[place] != groups[place - 1]:
            axis.axvline(place - 0.5, color="white", linewidth=3)
