"""Measures of FedCOM's figure."""

from __future__ import annotations

import math

import pandas as pd

from holdfast.reproduction.measures.base import measure
from holdfast.results.run import Run


def _curve(run: Run) -> pd.Series:
    return run.metrics["accuracy"].dropna().astype(float)


@measure("accuracy/early")
def early(run: Run) -> float | None:
    """Mean accuracy of the first tenth of the rounds, two at least: how fast it rises."""
    found = _curve(run)
    return float(found.iloc[: max(2, math.ceil(len(found) / 10))].mean()) if len(found) else None


@measure("accuracy/over-rounds")
def over_rounds(run: Run) -> float | None:
    """Mean accuracy of all rounds."""
    found = _curve(run)
    return float(found.mean()) if len(found) else None
