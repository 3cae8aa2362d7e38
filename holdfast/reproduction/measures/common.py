"""Measures of several papers."""

from __future__ import annotations

from holdfast.reproduction.measures.base import measure
from holdfast.results.run import Run


@measure("seconds")
def seconds(run: Run) -> float | None:
    """Clients and server together, without the evaluation."""
    return float(run.final["seconds/client"]) + float(run.final["seconds/server"])


@measure("megabytes")
def megabytes(run: Run) -> float | None:
    """Up and down, all clients together, in the whole run."""
    return (float(run.final["bytes/up"]) + float(run.final["bytes/down"])) / 1e6


@measure("seconds-of-a-round")
def seconds_of_a_round(run: Run) -> float | None:
    """Clients and server together in the median round: the first one may include preparations. Tuning after
    the last round does not count as a round."""
    rounds = run.metrics
    rounds = rounds[rounds["round"] <= run.manifest["config"]["train"]["rounds"]]
    return float((rounds["seconds/client"] + rounds["seconds/server"]).median())
