"""Measures of FedCPA's figures."""

from __future__ import annotations

import io

import pandas as pd
from pandas.api.types import is_numeric_dtype

from holdfast.core.errors import RunError
from holdfast.core.files import write_atomically
from holdfast.core.reading import read_whole
from holdfast.diagnostics.gradcam import heat_on_trigger
from holdfast.diagnostics.importance import by_place, rank_changes
from holdfast.reproduction.measures.base import measure
from holdfast.results.run import Run

_IMAGES = 200
"""Test images that are looked at; those of the target class, to which the trigger adds nothing, are then left
out."""


@measure("rank-change")
def rank_change(run: Run, part: str) -> float | None:
    """How far honest training moves parameters in the order by importance, as a share of all of them; of a
    part of the order, as 0-10%."""
    return _mean_of(run, part, "benign")


@measure("rank-disparity")
def rank_disparity(run: Run, part: str) -> float | None:
    """How much further poisoned training moves them than honest training from the same model; of a part of
    the order, as 0-10%."""
    return _mean_of(run, part, "disparity")


def _mean_of(run: Run, part: str, figure: str) -> float | None:
    low, high = (float(end) / 100 for end in part.removesuffix("%").split("-"))
    frame = _changes(run)
    if figure not in frame:
        raise RunError(
            f"{run.path / 'rank-change.csv'} has no '{figure}'; remove the file to compute rank changes again"
        )
    return float(frame[(frame["place"] > low) & (frame["place"] < high)][figure].mean())


def _changes(run: Run) -> pd.DataFrame:
    """Compute the rank changes once and keep them beside the run, because the run is repeated for them."""
    file = run.path / "rank-change.csv"
    if not file.exists():
        write_atomically(file, by_place(rank_changes(run, places=50)).to_csv(index=False).encode())
    try:
        frame = pd.read_csv(io.BytesIO(read_whole(file)))
        sound = "place" in frame and all(is_numeric_dtype(frame[column]) for column in frame)
    except (OSError, ValueError):  # also pandas' own: no columns, too many of them, not UTF-8
        sound = False
    if not sound:
        raise RunError(
            f"{file} is damaged: it does not hold rank changes by place; remove it to compute them again"
        )
    return frame


@measure("heat-on-trigger")
def mean_heat_on_trigger(run: Run) -> float | None:
    """Share of Grad-CAM's heat that lies on the trigger, mean over test images of other classes than the
    target that carry it."""
    frame = heat_on_trigger(run, range(min(_IMAGES, len(run._experiment.federation.global_test.row))))
    found = frame[frame["label"] != frame["target"]]["share"].dropna()
    return float(found.mean()) if len(found) else None
