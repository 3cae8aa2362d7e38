"""Checks the claims of a paper, on our numbers and on the published ones.

A claim is checked in every combination of the labels that it does not name (a case):

    best     axis, label          no other label of the axis is better by more than `by`
    worst    axis, label          no other label of the axis is worse by more than `by`
    beats    axis, label, over    better than each of `over` by at least `by`, or by a `factor`
    within   axis, label, over    at most `by`, or a `factor`, worse than the best of `over`, or than the
                                  published value if `over` is empty; without a label, all other labels are
    above    value                more than `value`
    below    value                less than `value`
    rises    axis                 the last label has more than the first, by at least `by`
    falls    axis                 the last label has less than the first, by at least `by`
    steady   axis                 the labels' values differ by at most `by`"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from holdfast.reproduction.experiments import AxisLabels
from holdfast.reproduction.study import Claim, Study, as_labels, label_text
from holdfast.reproduction.values import Values


@dataclass(frozen=True)
class ClaimResult:
    """In how many of the cases that could be checked a claim holds."""

    claim: Claim
    right: int
    cases: int
    wrong: tuple[str, ...]
    """The cases in which it does not hold, in words."""

    @property
    def holds(self) -> bool | None:
        """Whether the claim holds in enough cases; None if no case could be checked."""
        return None if not self.cases else self.right >= self.claim.least * self.cases - 1e-9

    @property
    def words(self) -> str:
        if not self.cases:
            return "not tested"
        if self.right == self.cases:
            return "holds"
        verdict = "holds" if self.holds else "does not hold"
        return verdict if self.cases == 1 else f"{verdict}: in {self.right} of {self.cases} cases"


def examine(claim: Claim, values: Values, against: Values | None = None) -> ClaimResult:
    """Check a claim; `against` are the published values, for `within` without `over`."""
    metric = metric_of(claim, values.study)
    sign = -1.0 if values.study.metrics[metric].less_is_better else 1.0
    right, wrong = 0, []
    for at in _cases(claim, values, metric):
        holds = _holds(claim, values, against, metric, at, sign)
        if holds is not None:
            right += holds
            if not holds:
                wrong.append(" ".join(label_text(axis, label) for axis, label in at.items()) or "here")
    return ClaimResult(claim, right, right + len(wrong), tuple(wrong))


def metric_of(claim: Claim, study: Study) -> str:
    return claim.metric or next(iter(study.metrics))


def _cases(claim: Claim, values: Values, metric: str) -> Iterable[AxisLabels]:
    """Iterate over the cases of a claim: places without its axis."""
    axes = [axis for axis in values.axes_of(metric) if axis != claim.axis]
    labels = [
        [
            label
            for label in values.labels[axis]
            if label in as_labels(claim.where.get(axis, tuple(values.labels[axis])))
        ]
        for axis in axes
    ]
    for chosen in itertools.product(*labels):
        yield dict(zip(axes, chosen, strict=True))


def _holds(
    claim: Claim, values: Values, against: Values | None, metric: str, at: AxisLabels, sign: float
) -> bool | None:
    """Whether the claim holds in one case; None if a number is missing."""

    def value(label: str | None) -> float | None:
        found = values.mean(metric, at if claim.axis is None or label is None else {**at, claim.axis: label})
        return None if found is None else sign * found

    return _CHECKS[claim.check](claim, values, against, value, at, metric)


ValueOf = Callable[[str | None], float | None]


def _best(
    claim: Claim, values: Values, against: Values | None, value: ValueOf, at: AxisLabels, metric: str
) -> bool | None:
    assert claim.axis is not None
    mine, others = value(claim.label), _known(value, (o for o in _along(claim, values) if o != claim.label))
    return None if mine is None or not others else mine >= max(others) - claim.by


def _worst(
    claim: Claim, values: Values, against: Values | None, value: ValueOf, at: AxisLabels, metric: str
) -> bool | None:
    mine, others = value(claim.label), _known(value, (o for o in _along(claim, values) if o != claim.label))
    return None if mine is None or not others else mine <= min(others) + claim.by


def _beats(
    claim: Claim, values: Values, against: Values | None, value: ValueOf, at: AxisLabels, metric: str
) -> bool | None:
    mine, others = value(claim.label), _known(value, claim.over)
    if mine is None or not others:
        return None
    if claim.factor > 1:
        return _worsened(mine, claim.factor) >= max(others)
    return mine - max(others) >= claim.by if claim.by else mine > max(others)


def _within(
    claim: Claim, values: Values, against: Values | None, value: ValueOf, at: AxisLabels, metric: str
) -> bool | None:
    others = _known(value, claim.over)
    if claim.label is None:
        rest = _known(value, (label for label in _along(claim, values) if label not in claim.over))
        return None if not rest or not others else min(rest) >= max(others) - claim.by
    mine = value(claim.label)
    if not claim.over and against is not None and claim.axis is not None:
        shown = {axis: label for axis, label in {**at, claim.axis: claim.label}.items() if axis != "variant"}
        found, published = values.mean(metric, {**at, claim.axis: claim.label}), against.mean(metric, shown)
        return None if found is None or published is None else abs(found - published) <= claim.by
    return None if mine is None or not others else mine >= _worsened(max(others), claim.factor) - claim.by


def _worsened(figure: float, factor: float) -> float:
    """Make a number worse by a factor; numbers are negative where less is better."""
    return figure / factor if figure > 0 else figure * factor


def _above(
    claim: Claim, values: Values, against: Values | None, value: ValueOf, at: AxisLabels, metric: str
) -> bool | None:
    return _bound(claim, values, at, metric, lambda found, bound: found > bound)


def _below(
    claim: Claim, values: Values, against: Values | None, value: ValueOf, at: AxisLabels, metric: str
) -> bool | None:
    return _bound(claim, values, at, metric, lambda found, bound: found < bound)


def _bound(
    claim: Claim, values: Values, at: AxisLabels, metric: str, so: Callable[[float, float], bool]
) -> bool | None:
    place: Mapping[str, str] = at if claim.axis is None else {**at, claim.axis: claim.label or ""}
    found = values.mean(metric, place)
    assert claim.value is not None
    return None if found is None else so(found, claim.value)


def _rises(
    claim: Claim, values: Values, against: Values | None, value: ValueOf, at: AxisLabels, metric: str
) -> bool | None:
    return _trend(claim, values, at, metric, 1.0)


def _falls(
    claim: Claim, values: Values, against: Values | None, value: ValueOf, at: AxisLabels, metric: str
) -> bool | None:
    return _trend(claim, values, at, metric, -1.0)


def _steady(
    claim: Claim, values: Values, against: Values | None, value: ValueOf, at: AxisLabels, metric: str
) -> bool | None:
    known = _known(value, _along(claim, values))
    return None if len(known) < 2 else max(known) - min(known) <= claim.by


def _trend(claim: Claim, values: Values, at: AxisLabels, metric: str, sign: float) -> bool | None:
    assert claim.axis is not None
    found = [values.mean(metric, {**at, claim.axis: label}) for label in _along(claim, values)]
    known = [v for v in found if v is not None]
    if len(known) < 2:
        return None
    change = sign * (known[-1] - known[0])
    return change >= claim.by if claim.by else change > 0


def _along(claim: Claim, values: Values) -> list[str]:
    """Return the labels of the claim's axis that it is about."""
    shown = values.labels.get(claim.axis or "", ())
    return [label for label in shown if label in as_labels(claim.where.get(claim.axis or "", tuple(shown)))]


def _known(value: ValueOf, labels: Iterable[str]) -> list[float]:
    return [found for label in labels if (found := value(label)) is not None]


_CHECKS = {
    "best": _best,
    "worst": _worst,
    "beats": _beats,
    "within": _within,
    "above": _above,
    "below": _below,
    "rises": _rises,
    "falls": _falls,
    "steady": _steady,
}
