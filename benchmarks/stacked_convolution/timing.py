"""Times of forms of the same work, by turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.local.program import _captured

from .setting import Setting

if TYPE_CHECKING:
    from ..convolution_kernel import Part


def repeated(run: Callable[[], Any], device: str) -> Callable[[], Any]:
    """Return the work as one call: on a GPU a captured graph."""
    if device != "cuda":
        return run
    kept: list[Any] = []

    def keeping() -> None:
        kept[:] = [run()]

    graph = _captured(keeping, torch.device("cuda", torch.cuda.current_device()))

    def replay() -> list[Any]:
        graph.replay()
        return kept  # the graph writes to the results of the call that was captured, so they have to stay

    return replay


def medians(forms: dict[str, Callable[[], Any]], setting: Setting, turns: int) -> dict[str, float]:
    """Let the forms take turns; return the median of the seconds of each."""
    repeats = {}
    for name, work in forms.items():
        work()
        repeats[name] = max(1, min(500, int(setting.seconds / _seconds(work, 1, setting.device))))
    found: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(turns):
        for name, work in forms.items():
            found[name].append(_seconds(work, repeats[name], setting.device))
    return {name: statistics.median(times) for name, times in found.items()}


def compared(
    part: Part, name: str, works: dict[str, Callable[[], Any]], setting: Setting, **row: Any
) -> float:
    """Time products and kernels, print a line, and return the ratio of their times."""
    times = medians(works, setting, setting.turns)
    ratio, each = (
        times["products"] / times["kernels"],
        {form: t / row["clients"] for form, t in times.items()},
    )
    apart = " ".join(f"{what} {row[what]:.1e}" for what in ("difference", "error", "usual") if what in row)
    part.report.say(
        f"  {name:36} products {each['products'] * 1e6:9.2f}  kernels {each['kernels'] * 1e6:9.2f}"
        f"  {ratio:5.2f}x  {apart}",
        part.name,
        **{**row, "seconds": times, "ratio": ratio},
    )
    return ratio


def distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of a difference as a share of the norm."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def _seconds(work: Callable[[], Any], repeats: int, device: str) -> float:
    if device != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / repeats
