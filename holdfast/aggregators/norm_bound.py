"""Norm bounding: no update counts for more than its length allows (Sun et al., 2019, section 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of, separate, vectors
from holdfast.aggregators.geometry import norms, weighted
from holdfast.aggregators.ordered import equal_weights, lowest
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
from holdfast.core.registry import register, setting
from holdfast.core.types import State

PAPER = "Sun et al., Can You Really Backdoor Federated Learning?, 2019"


@register("aggregator", "norm-bound", paper=PAPER)
class NormBound(Aggregator):
    """The weighted mean after long updates were shortened to the bound (clip), left out (drop), or the f
    longest were (keep-smallest).

    The bound is a length, or a multiple of the cohort's median length, which holds while n > 2f. Limits how
    far attackers move the model in a round, but not the direction: short malicious updates pass. FedCPA's
    code keeps the smallest by the length of the whole model (`of = "model"`). The weights returned are the
    incoming ones as they took part: shortened by clipping, shared out again after dropping."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": "weighted mean after long updates are shortened",
        "weights returned": "the incoming ones, shortened or shared out",
        "variants and options": (
            '`mode = "drop"`, `"keep-smallest"` (the n - f shortest; needs n > f); `bound`, '
            '`relative`; `of = "model"` (FedCPA\'s code)'
        ),
        "paper": "Sun et al. 2019",
    }
    reads: ClassVar[Reads] = "gram"
    keeps: ClassVar[frozenset[str]] = frozenset({"scale"})
    mode: Literal["clip", "drop", "keep-smallest"] = setting("clip", "what happens to long updates")
    bound: float | None = setting(None, "largest length of an update; none: relative to the median", gt=0)
    relative: float = setting(1.0, "bound in median lengths, where no bound is set", gt=0)
    of: Literal["update", "model"] = setting("update", "what keep-smallest measures: updates or whole models")

    @property
    def condition(self) -> str:  # type: ignore[override]
        return "n > 2f" if self.by_median() else "n > f"

    def by_median(self) -> bool:
        """Whether the bound follows from the cohort, of which more than half must then be honest."""
        return self.mode != "keep-smallest" and self.bound is None

    def least(self, f: int) -> int:
        return 2 * f + 1 if self.by_median() else f + 1

    def idle(self) -> bool:
        return self.f is None and self.mode == "keep-smallest"

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        received = vectors([ctx.received], x)[0] if self.of == "model" else None
        weights = self.shortened(x, w, ctx.ids, received, ctx.assumed)
        return Reduced(weighted(weights, x), weights, state)

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        if x.shape[1] < self.least(contexts[0].assumed):
            return self.fall_back_together(x, states, contexts)
        received = vectors([ctx.received for ctx in contexts], x) if self.of == "model" else None
        weights = self.shortened(x, w, ids_of(contexts), received, contexts[0].assumed)
        return separate(weighted(weights, x), weights, states)

    def shortened(self, x: Tensor, w: Tensor, ids: Tensor, received: Tensor | None, f: int) -> Tensor:
        """The weights as they take part."""
        w = to_device(w, x.device)
        if self.mode == "keep-smallest":
            length = norms(x) if received is None else norms(x, -received)
            return _shared_out(w * (equal_weights(lowest(length, x.shape[-2] - f, ids), x) > 0))
        length = norms(x)
        bound = (
            torch.full_like(length[..., :1], self.bound)
            if self.bound is not None
            else self.relative * length.quantile(0.5, dim=-1, keepdim=True)
        )
        if self.mode == "drop":
            return _shared_out(w * (length <= bound))
        return w * (bound / length).nan_to_num_(nan=1.0).clamp_(max=1).to(w.dtype)


def _shared_out(kept: Tensor) -> Tensor:
    """Where all clients are dropped, the model stays as it was."""
    total = kept.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, kept / total, 0)
