"""What attackers may learn about an experiment beside what is sent in it: the layers of its network, which
every client sees, and the server's rule, which only those see who know the defence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Assessment, Reduced
from holdfast.aggregators.geometry import mean
from holdfast.aggregators.reduction import Candidates, Reduction
from holdfast.core.columns import current, sharing
from holdfast.core.device import to_device
from holdfast.core.flat import Layout, Slot
from holdfast.core.keys import Key
from holdfast.core.types import Uplink


@dataclass(frozen=True)
class Target:
    """What an experiment's attackers attack."""

    rule: Aggregator | None = None
    """The server's aggregator, with its settings and its wrappers; none where attackers do not know it."""
    layout: Callable[[], Layout] | None = None
    """Returns where the tensors of a model lie among the columns of an update; none where no model is
    sent."""

    def without_rule(self) -> Target:
        return replace(self, rule=None)

    def of_means(self) -> Target:
        """The same where class means are attacked."""
        return replace(self, layout=None)

    def layout_of(self, width: int) -> Layout:
        """The layout, or one tensor of this width."""
        if self.layout is not None:
            return self.layout()
        return Layout((Slot("mean", (1, width), 0, width, torch.float32, buffer=False, frozen=False),))


class Trial:
    """The server's rule, to be tried out on the honest updates with other rows in place of the attackers'.

    Rule, settings and wrappers are the server's own. What attackers cannot see is as they would guess it: the
    rule's memory as it is before the first round, random draws of their own, the mean of the benign updates
    in place of the server's own update, no answer of the server's tests of models, and weights by the sample
    counts that honest clients report. Detectors are not tried. It holds one copy of the updates."""

    def __init__(
        self,
        rule: Aggregator,
        layout: Layout,
        honest: Uplink,
        field: str,
        mine: Tensor,
        received: Tensor | None,
        key: Key,
        round: int,
    ):
        shared = current()
        self.rule, self.clients = rule, len(honest)
        self.attackers = mine
        """Positions of their rows, on the host."""
        self._x, self._shared = honest[field].clone(), shared
        self._mine = to_device(mine, self._x.device)
        n, others = len(self._x), torch.ones(len(self._x), dtype=torch.bool)
        others[mine] = False
        self.benign = mean(self._x[others] if bool(others.any()) else self._x)
        """The mean of the benign updates."""
        self._weights = _weights(rule, honest, self._x.dtype)
        self._state = rule.init(layout)
        if received is None:
            received = torch.zeros_like(self._x[0])
        self._ctx = AggregationContext(
            ids=honest.ids,
            received=received if shared is None else shared.whole(received),
            layout=layout,
            key=key.fold("defence"),
            round=round,
            assumed=rule.assumed(n),
            root=self.benign if "root" in rule.needs else None,
        )

    def __call__(self, rows: Tensor) -> Reduced:
        """What the server would make of all updates if attackers sent these rows, or this row each. The
        aggregate is in the columns that this process has; the weights are on the host."""
        self._x[self._mine] = rows.to(self._x)
        with sharing(None):
            asked = Reduction(self.rule, self._x, self._weights, self._state, self._ctx, self._shared)
            found = asked.alone()
            if isinstance(found, Candidates):
                nothing = Assessment(torch.zeros(0), torch.zeros(0))
                found = replace(asked, assessment=nothing).alone()
        assert isinstance(found, Reduced)
        return found if self._shared is None else found._replace(value=self._shared.mine(found.value))


def _weights(rule: Aggregator, honest: Uplink, dtype: torch.dtype) -> Tensor:
    """[n]: weights before the rule: shares of the reported samples, or equal ones."""
    n = len(honest)
    if rule.weights == "samples" and "count" in honest.fields:
        count = honest["count"].to(dtype)
        total = count.sum()
        if bool(total > 0) and bool(torch.isfinite(total)):
            return count / total
    return torch.full((n,), 1.0 / n, dtype=dtype)
