"""An aggregator around an aggregator. A wrapper defines in `reduce` what it does before or after the rule
inside; the rest is forwarded."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, Wrapper
from holdfast.core.columns import READS, Reads, reads_of
from holdfast.core.errors import ConfigError
from holdfast.core.flat import Layout
from holdfast.core.registry import INVALID, explain
from holdfast.core.types import State


class Around(Wrapper):
    """Base class of wrappers: a subclass defines what differs from the rule inside. The rule inside keeps its
    own memory, which passes through `reduce` as it is."""

    def __call__(self, inner: Aggregator) -> Aggregator:
        self.check(inner)
        try:
            return Wrapped(inner=inner, by=self, weights=inner.weights, f=inner.f)
        except INVALID as error:
            raise ConfigError(explain(error, Wrapped, "aggregator")) from None

    def reduce(
        self, inner: Aggregator, x: Tensor, w: Tensor, state: State, ctx: AggregationContext
    ) -> Reduced:
        raise TypeError(f"{type(self).__name__} does not define how it reduces")

    def reduce_together(
        self,
        inner: Aggregator,
        x: Tensor,
        w: Tensor,
        states: Sequence[State],
        contexts: Sequence[AggregationContext],
    ) -> list[Reduced] | None:
        """The same for several experiments, as `Aggregator.together`."""
        return None

    def check(self, inner: Aggregator) -> None:
        """Raise a ConfigError for a rule that it cannot wrap."""

    def needs(self, inner: Aggregator) -> frozenset[str]:
        return inner.needs

    def after_step(self, model: Tensor, ctx: AggregationContext) -> Tensor:
        """What it does to the model after the server's step, as `Aggregator.after_step`."""
        return model

    def uses_priors(self, inner: Aggregator) -> bool:
        return inner.uses_priors

    def least(self, inner: Aggregator, f: int) -> int:
        return inner.least(f)

    def condition(self, inner: Aggregator) -> str:
        return inner.condition


class Wrapped(Aggregator):
    """A rule with one wrapper around it: what the wrapper does not change is the rule's own."""

    inner: Aggregator
    by: Around

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.by.name}({self.inner.name})"

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.by.needs(self.inner)

    @property
    def reads(self) -> Reads:  # type: ignore[override]
        return max(reads_of(self.by), reads_of(self.inner), key=READS.index)

    @property
    def uses_priors(self) -> bool:  # type: ignore[override]
        return self.by.uses_priors(self.inner)

    @property
    def condition(self) -> str:  # type: ignore[override]
        return self.by.condition(self.inner)

    def least(self, f: int) -> int:
        return self.by.least(self.inner, f)

    def remembers(self) -> str:
        return self.inner.remembers()

    def idle(self) -> bool:
        return self.inner.idle()

    def trusts(self) -> int | None:
        return self.inner.trusts()

    def init(self, layout: Layout) -> State:
        return self.inner.init(layout)

    def assumed(self, n: int) -> int:
        return self.inner.assumed(n)

    def after_step(self, model: Tensor, ctx: AggregationContext) -> Tensor:
        return self.by.after_step(self.inner.after_step(model, ctx), ctx)

    def works_on_device(self) -> bool:
        return self.by.works_on_device() and self.inner.works_on_device()

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        return self.by.reduce(self.inner, x, w, state, ctx)

    def together(
        self,
        x: Tensor,
        w: Tensor,
        states: Sequence[State],
        contexts: Sequence[AggregationContext],
    ) -> list[Reduced] | None:
        return self.by.reduce_together(self.inner, x, w, states, contexts)

    def layers(self) -> tuple[Aggregator, list[Wrapper]]:
        rule, around = self.inner.layers()
        return rule, [*around, self.by]


def reduce_each(
    inner: Aggregator, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
) -> list[Reduced]:
    """The rule on several experiments: together where it can, else one after the other."""
    found = inner.together(x, w, states, contexts)
    return [inner(*of) for of in zip(x, w, states, contexts, strict=True)] if found is None else found


def need_f(wrapper: Wrapper, inner: Aggregator) -> None:
    """Refuse a missing f: a wrapper that leaves out f clients would be the plain mean without notice."""
    if inner.f is None:
        raise ConfigError(
            f"wrapper '{wrapper.name}' needs f, the share (or number) of clients that are assumed malicious;"
            " set aggregator.f, for example 0.3"
        )
