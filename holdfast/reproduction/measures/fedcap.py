"""Measures of FedCAP: the norm of malicious updates (Fig. 3), and how soon TAcc reaches 80 % (Table V)."""

from __future__ import annotations

import pandas as pd

from holdfast.reproduction.measures.base import measure
from holdfast.results.run import Run


@measure("rounds-to-tacc-80")
def rounds_to_tacc(run: Run) -> float | None:
    """The first evaluated round in which TAcc is 80 % or more: that of the better of the two models,
    whichever it is by then."""
    rounds = run.metrics
    reached = rounds.loc[rounds["accuracy/tacc"] >= 0.8, "round"]
    return float(reached.iloc[0]) if len(reached) else None


@measure("norm/malicious/first")
def malicious_first(run: Run) -> float | None:
    """Median length of malicious clients' updates in the first round that has any."""
    return _at(lengths(run, True), 0)


@measure("norm/malicious/last")
def malicious_last(run: Run) -> float | None:
    """Median length of malicious clients' updates in the last round that has any: those that are not finite
    were refused."""
    return _at(lengths(run, True), -1)


@measure("norm/benign/last")
def benign_last(run: Run) -> float | None:
    """Median length of benign clients' updates in the last round that has any."""
    return _at(lengths(run, False), -1)


@measure("norm/malicious/growth")
def malicious_growth(run: Run) -> float | None:
    """How many times as long the updates of malicious clients became: the longest round's median over the
    first one's."""
    found = lengths(run, True)
    return float(found.max() / found.iloc[0]) if len(found) and found.iloc[0] > 0 else None


def lengths(run: Run, malicious: bool) -> pd.Series:
    """Median length of each round's finite updates, of one kind of client."""
    norms = run.table("norms")
    chosen = norms[(norms["malicious"] == malicious) & (norms["value"] < float("inf"))]
    return chosen.groupby("round")["value"].median()


def _at(found: pd.Series, place: int) -> float | None:
    return float(found.iloc[place]) if len(found) else None
