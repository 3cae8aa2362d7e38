"""Paired tests of two settings under the same seeds. The seeds are the sample, so all tests are on
differences."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

LEAST = 3  # pairs, below which no test says anything
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Paired:
    """The differences of n pairs: their mean with its interval, and p values. A figure is None where it is
    not defined: one pair has no interval, and differences that do not vary have no t."""

    pairs: int
    mean: float
    low: float | None = None
    high: float | None = None
    t: float | None = None
    """p of the paired t-test, two-sided."""
    wilcoxon: float | None = None
    """p of the signed-rank test, two-sided."""


def paired(differences: Sequence[float]) -> Paired:
    count, mean = len(differences), statistics.fmean(differences)
    if count < LEAST:
        return Paired(count, mean)
    signed = _signed_rank(differences)
    spread = statistics.stdev(differences)
    if spread <= 1e-12 * max(abs(mean), 1e-300):  # only rounding errors
        return Paired(count, mean, mean, mean, None, signed)
    error = spread / math.sqrt(count)
    reach = error * float(stats.t.ppf(0.5 + CONFIDENCE / 2, count - 1))
    return Paired(
        count, mean, mean - reach, mean + reach, float(stats.ttest_1samp(differences, 0.0).pvalue), signed
    )


def _signed_rank(differences: Sequence[float]) -> float | None:
    """p of the signed-rank test. Zero differences are left out, as Wilcoxon did; None where no other is
    left."""
    if not any(differences):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about few pairs; a note beside the table says it
        return float(stats.wilcoxon(differences).pvalue)


def smallest(pairs: int) -> float:
    """The smallest p that the signed-rank test can give: all differences have one sign."""
    return min(1.0, 2.0 ** (1 - pairs))


def holm(given: Sequence[float | None]) -> list[float | None]:
    """Holm's correction of p values for their number: the chance of any false alarm among all is bounded by
    the level. Values that are None were not tested and do not count."""
    tested = sorted((p, place) for place, p in enumerate(given) if p is not None)
    out: list[float | None] = [None] * len(given)
    largest = 0.0
    for rank, (p, place) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))
        out[place] = largest
    return out
