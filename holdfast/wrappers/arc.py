"""ARC, adaptive robust clipping (Allouah et al., ICLR 2025): the longest updates are shortened, as many as
follows from the number of attackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.aggregators.geometry import norms
from holdfast.core.columns import Reads
from holdfast.core.registry import register
from holdfast.core.types import State
from holdfast.wrappers.base import Around, need_f, reduce_each
from holdfast.wrappers.clip import to_length

PAPER = "Allouah et al., Adaptive Gradient Clipping for Robust Federated Learning, ICLR 2025"


@register("wrapper", "arc", paper=PAPER)
class AdaptiveRobustClipping(Around):
    """The rule on updates of which the k = floor(2 f (n - f) / n) longest are shortened to the length of the
    longest one that is left.

    Because k >= f, that length is at most an honest one, whatever attackers send, and the rule inside keeps
    its guarantee; a fixed bound (`clip`) has to be chosen for each attack and each phase of training. A round
    of no more than 2f clients falls back to the median. The server's own root update is not touched."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what the rule sees": "the 2 f (n - f) / n longest updates shortened to the longest one that is left",
        "what comes out": "the rule's aggregate",
        "from": "Allouah et al., ICLR 2025",
    }
    reads: ClassVar[Reads] = "gram"

    def check(self, inner: Aggregator) -> None:
        need_f(self, inner)

    def condition(self, inner: Aggregator) -> str:
        return f"{inner.condition} and n > 2f"

    def least(self, inner: Aggregator, f: int) -> int:
        return max(inner.least(f), 2 * f + 1)

    def reduce(
        self, inner: Aggregator, x: Tensor, w: Tensor, state: State, ctx: AggregationContext
    ) -> Reduced:
        if len(x) <= 2 * ctx.assumed:
            return inner.fall_back(x, state, ctx)
        return inner(shortened(x, ctx.assumed), w, state, ctx)

    def reduce_together(
        self,
        inner: Aggregator,
        x: Tensor,
        w: Tensor,
        states: Sequence[State],
        contexts: Sequence[AggregationContext],
    ) -> list[Reduced]:
        f = contexts[0].assumed
        if x.shape[1] <= 2 * f:
            return inner.fall_back_together(x, states, contexts)
        return reduce_each(inner, shortened(x, f), w, states, contexts)


def shortened(x: Tensor, f: int) -> Tensor:
    """A copy of the updates, none of them longer than the longest of those that are not shortened."""
    length, n = norms(x), x.shape[-2]
    longest = length.sort(dim=-1, descending=True).values
    at = 2 * f * (n - f) // n
    return to_length(x, length, longest[..., at : at + 1])
