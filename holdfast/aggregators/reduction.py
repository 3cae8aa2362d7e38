"""One aggregation that a server half asks for. Those of experiments with the same rule and equally many
clients can be computed together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.core.device import on_host, to_device
from holdfast.core.together import Computation, stacked
from holdfast.core.types import State
from holdfast.local.function_identity import identity


@dataclass(frozen=True, eq=False)
class Reduction(Computation):
    """A rule, the updates [n, d], the weights before the rule [n], its memory, and what else it may know."""

    rule: Aggregator
    x: Tensor
    w: Tensor
    state: State
    ctx: AggregationContext

    def on_device(self) -> bool:
        return self.x.device.type != "cpu"

    def alike(self) -> Hashable | None:
        if not self.rule.works_on_device():
            return None
        memory = tuple((name, tuple(value.shape)) for name, value in sorted(self.state.items()))
        return (
            type(self.rule),
            identity(self.rule),
            tuple(self.x.shape),
            self.x.dtype,
            self.w.dtype,
            self.x.device,
            self.ctx.layout,
            self.ctx.assumed,
            self.ctx.root is None,
            memory,
        )

    def alone(self) -> Reduced:
        x, w, state, ctx = self.x, self.w, self.state, self.ctx
        if not self.on_device() or self.rule.works_on_device():
            return _weights_on_host([Reduced(*self.rule(x, w, state, ctx))])[0]
        root = None if ctx.root is None else ctx.root.cpu()
        seen = replace(ctx, received=ctx.received.cpu(), root=root)
        found = Reduced(*self.rule(x.cpu(), w, on_host(state), seen))
        return found._replace(value=to_device(found.value, x.device))

    def together(self, others: Sequence[Any]) -> list[Reduced] | None:
        """By the rule's own form for several experiments, where it has one."""
        all_of_them = [self, *others]
        found = self.rule.together(
            stacked([one.x for one in all_of_them]),
            torch.stack([one.w for one in all_of_them]),
            [one.state for one in all_of_them],
            [one.ctx for one in all_of_them],
        )
        return None if found is None else _weights_on_host(found)


def _weights_on_host(found: list[Reduced]) -> list[Reduced]:
    """The same with the weights on the host, where they are compared and recorded; the host waits once."""
    if all(one.weights.device.type == "cpu" for one in found):
        return found
    weights = torch.stack([one.weights for one in found]).cpu()
    return [one._replace(weights=weights[place]) for place, one in enumerate(found)]
