"""One aggregation that a server half asks for. Those of experiments with the same rule and equally many
clients can be computed together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Assessment, Reduced
from holdfast.core.columns import Columns, current, reads_of, sharing, warn_of_rows
from holdfast.core.device import on_host, to_device
from holdfast.core.together import Computation, stacked
from holdfast.core.types import State
from holdfast.local.function_identity import identity


@dataclass(frozen=True, eq=False)
class Candidates:
    """Aggregates of which a rule asks how good their models are, before it goes on."""

    reduced: list[Reduced]


class _Asked(Exception):
    """Ends a rule that asks."""

    def __init__(self, candidates: Sequence[Reduced]):
        super().__init__("this rule waits for the server's test of models")
        self.candidates = candidates


@dataclass(frozen=True, eq=False)
class Reduction(Computation):
    """A rule, the updates [n, d], the weights before the rule [n], its memory, and what else it may know."""

    rule: Aggregator
    x: Tensor
    w: Tensor
    state: State
    ctx: AggregationContext
    columns: Columns | None = field(default_factory=current)
    """Which columns of the updates are here, where several processes share them; the aggregate is whole."""
    assessment: Assessment | None = None
    """How good the models are that the rule asked about; None: it has not asked yet."""

    def on_device(self) -> bool:
        return self.x.device.type != "cpu"

    def alike(self) -> Hashable | None:
        if not self.rule.works_on_device() or self.columns is not None or "assess" in self.rule.needs:
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

    def alone(self) -> Reduced | Candidates:
        """The aggregate, or what the rule asks first: it is then started again, with the answer."""
        try:
            return self._of_columns()
        except _Asked as asked:
            shared = None if reads_of(self.rule) == "rows" else self.columns
            values = [one.value if shared is None else shared.whole(one.value) for one in asked.candidates]
            return Candidates(
                [
                    one._replace(value=to_device(value, self.x.device), weights=one.weights.cpu())
                    for one, value in zip(asked.candidates, values, strict=True)
                ]
            )

    def _of_columns(self) -> Reduced:
        if self.columns is None:
            return self._reduced()
        if reads_of(self.rule) == "rows":
            return self._gathered(self.columns)._reduced()
        with sharing(self.columns):
            found = self._mine(self.columns)._reduced()
        state = {
            name: self.columns.whole(value) if _per_column(value) else value
            for name, value in found.state.items()
        }
        return found._replace(value=self.columns.whole(found.value), state=state)

    def _gathered(self, columns: Columns) -> Reduction:
        """The same on whole updates."""
        warn_of_rows(f"aggregator '{self.rule.name}'", columns, self.x.element_size())
        root = None if self.ctx.root is None else columns.whole(self.ctx.root)
        return replace(self, x=columns.whole(self.x), ctx=replace(self.ctx, root=root), columns=None)

    def _mine(self, columns: Columns) -> Reduction:
        """The same with the columns that this process has of the memory and of what else has some."""
        mine = {
            name: columns.mine(value) if _per_column(value) else value for name, value in self.state.items()
        }
        return replace(self, state=mine, ctx=replace(self.ctx, received=columns.mine(self.ctx.received)))

    def _reduced(self) -> Reduced:
        x, w, state, ctx = self.x, self.w, self.state, self.ctx
        if "assess" in self.rule.needs:
            ctx = replace(ctx, assess=self._assess)
        if not self.on_device() or self.rule.works_on_device():
            return _weights_on_host([Reduced(*self.rule(x, w, state, ctx))])[0]
        root = None if ctx.root is None else ctx.root.cpu()
        seen = replace(ctx, received=ctx.received.cpu(), root=root)
        found = Reduced(*self.rule(x.cpu(), w, on_host(state), seen))
        return found._replace(value=to_device(found.value, x.device))

    def _assess(self, candidates: Callable[[], Sequence[Reduced]]) -> Assessment:
        if self.assessment is None:
            raise _Asked(candidates())
        return self.assessment

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


def _per_column(value: Tensor) -> bool:
    """Whether a tensor of a rule's memory has a number for each column of the updates: ids are counted, what
    belongs to columns is measured."""
    return value.ndim > 0 and value.is_floating_point()
