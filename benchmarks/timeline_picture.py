"""The picture of benchmarks/timeline.py: one lane for the device and for each thread over the seconds of some
rounds, and below it the seconds of a round by part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from spans import Interval, Span  # noqa: E402

COLOURS = {
    "GPU computes": "#15803d",
    "GPU copies": "#86c49b",
    "client half": "#4ca66b",
    "training": "#15803d",
    "evaluation": "#0e7490",
    "stacks put together": "#1668b8",
    "private rows read": "#7db4e6",
    "copied to the host": "#db2777",
    "replies shared out": "#a78bda",
    "attacks": "#c2410c",
    "screening": "#f0a36b",
    "servers": "#7e22ce",
    "round written down": "#d4a017",
    "commit": "#8a5a00",
    "disk": "#5b4a2f",
    "waits for other threads": "#e2e8f0",
    "waits for the GPU": "#d5e8da",
    "everything else": "#9aa3af",
}
OTHER = "#9aa3af"
_PIXELS = 2400  # stretches shorter than this part of the picture are joined with their neighbours


def draw(
    folder: Path,
    found: Mapping[str, Any],
    lanes: Mapping[str, list[Span]],
    device: tuple[str, Mapping[str, list[Interval]]],
    edges: Mapping[int, Interval],
) -> None:
    """Write timeline.png and timeline.svg."""
    names = [device[0], *lanes]
    start, end = min(a for a, _ in edges.values()), max(b for _, b in edges.values())
    least = (end - start) / _PIXELS
    tall = 0.55 * len(names) + 1.3
    shown = {**found["seconds_of_a_round"], device[0]: _of_device(found)}
    rows = len(summed(shown))
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(11, tall + 0.22 * rows + 1.2), height_ratios=[tall, 0.22 * rows + 0.5]
    )
    for kind, pieces in device[1].items():
        visible = [(a, b) for a, b in pieces if b > start and a < end]
        _bars(above, 0, joined(visible, least), start, kind)
    for place, spans in enumerate(lanes.values(), start=1):
        for part in dict.fromkeys(span.part for span in spans):
            pieces = [(s.start, s.end) for s in spans if s.part == part]
            _bars(above, place, joined(pieces, least), start, part)
    _axes(above, names, edges, start, end)
    _title(above, found)
    _seconds(below, shown)
    figure.tight_layout()
    for kind in ("png", "svg"):
        figure.savefig(
            folder / f"timeline.{kind}", dpi=130, metadata={"Date": None} if kind == "svg" else None
        )
    pyplot.close(figure)


def _of_device(found: Mapping[str, Any]) -> Mapping[str, float]:
    """Seconds of a round of the device, by what it does; not on a CPU, where they are the host's already."""
    return found["device_seconds_of_a_round"] if found["device"] == "cuda" else {}


def joined(pieces: Iterable[Interval], least: float) -> list[Interval]:
    """Stretches with gaps too short to see between them as one."""
    out: list[Interval] = []
    for start, end in sorted(pieces):
        if out and start - out[-1][1] < least / 2:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((start, end))
    return [(start, end) for start, end in out if end - start > least / 4]


def _bars(axes: Axes, place: int, pieces: list[Interval], start: float, part: str) -> None:
    if pieces:
        lengths = [(a - start, b - a) for a, b in pieces]
        axes.broken_barh(lengths, (place - 0.38, 0.76), facecolors=COLOURS.get(part, OTHER), linewidth=0)


def _axes(axes: Axes, names: list[str], edges: Mapping[int, Interval], start: float, end: float) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.4, -1.1)
    axes.set_xlim(0, end - start)
    axes.set_xlabel("seconds", fontsize=9)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for number, (a, b) in edges.items():
        if a > start:
            axes.axvline(a - start, color="#111", lw=1, ls=(0, (4, 3)))
        axes.text((a + b) / 2 - start, -0.72, f"round {number}: {b - a:.2f} s", ha="center", fontsize=9)


def _title(axes: Axes, found: Mapping[str, Any]) -> None:
    where = found["device_name"] if found["device"] == "cuda" else f"a CPU with {found['cores']} cores"
    trained = "" if found["training"] == "real" else ", noise in place of training"
    share = f"the GPU works {found['device_works']:.0%} of the time" if found["device"] == "cuda" else ""
    axes.set_title(
        f"{found['experiments']} experiments of FedCAP's Table I in lockstep on {where}{trained}"
        + (f": {share}" if share else ""),
        fontsize=11,
        loc="left",
        pad=10,
    )


def _seconds(axes: Axes, spent: Mapping[str, Mapping[str, float]]) -> None:
    """Seconds of a round by part, in the colours of the picture above: first the main thread's, then, behind
    a white line, those of the other threads."""
    main, total = spent.get("main thread", {}), summed(spent)
    order = sorted(total, key=lambda part: total[part])
    for place, part in enumerate(order):
        own, colour = main.get(part, 0.0), COLOURS.get(part, OTHER)
        axes.barh(place, own, color=colour, height=0.7)
        axes.barh(place, total[part] - own, left=own, color=colour, height=0.7, edgecolor="white", lw=0.8)
        text = f"{total[part]:.2f} s"
        if 0.005 < own < total[part] - 0.005:
            text += f", of them {own:.2f} s in the main thread"
        axes.text(total[part], place, f"  {text}", va="center", fontsize=8)
    axes.set_yticks(range(len(order)), order, fontsize=8)
    axes.set_xlim(0, max(total.values(), default=1.0) * 1.25)
    axes.tick_params(length=0, labelsize=8)
    axes.set_title(
        "The same colours by name: seconds of one round, the threads of the host together",
        fontsize=9,
        loc="left",
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def summed(spent: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Seconds by part, all threads together; parts that nobody would see are left out."""
    total: dict[str, float] = {}
    for parts in spent.values():
        for part, seconds in parts.items():
            total[part] = total.get(part, 0.0) + seconds
    return {part: seconds for part, seconds in total.items() if seconds >= 0.005}
