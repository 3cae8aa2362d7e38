"""RFA: the geometric median of the updates by the smoothed Weiszfeld algorithm (Pillutla et al., IEEE TSP
2022, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, separate
from holdfast.aggregators.geometry import diagonal, norms, seen_from, to_mixture, weighted
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
from holdfast.core.registry import register, setting
from holdfast.core.types import State

PAPER = (
    "Pillutla, Kakade and Harchaoui, Robust Aggregation for Federated Learning, IEEE Transactions on Signal"
    " Processing 2022"
)


@register("aggregator", "rfa", paper=PAPER)
class RFA(Aggregator):
    """The point with the smallest weighted sum of distances to all updates: less than half of the weight
    cannot move it arbitrarily far.

    From the weighted mean on, each update counts by its weight over its distance to the point before, until
    no distance changes. The weights returned are those of the last step; layer by layer (FedCAP's code) their
    mean over all coordinates."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": "geometric median, by the smoothed Weiszfeld algorithm",
        "weights returned": "those of the last step",
        "variants and options": (
            "`per_layer`: one for each tensor (FedCAP's code); `smoothing`, `iterations`, `tolerance`"
        ),
        "paper": "Pillutla et al. 2022",
    }
    condition: ClassVar[str] = "n > 2f"
    keeps: ClassVar[frozenset[str]] = frozenset({"shift", "scale", "hull"})
    smoothing: float = setting(1e-6, "smallest distance that is used", gt=0)
    iterations: int = setting(100, "largest number of steps", ge=1)
    tolerance: float = setting(1e-6, "stop when no distance changes by more than this share", ge=0)
    per_layer: bool = setting(
        False, "one geometric median for each tensor instead of one for the whole update"
    )

    @property
    def reads(self) -> Reads:  # type: ignore[override]
        return "rows" if self.per_layer else "gram"  # a process has parts of tensors

    def least(self, f: int) -> int:
        return 2 * f + 1

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        return Reduced(*self.middles(x, w, ctx), state)

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        if x.shape[1] < self.least(contexts[0].assumed):
            return self.fall_back_together(x, states, contexts)
        return separate(*self.middles(x, w, contexts[0]), states)

    def middles(self, x: Tensor, w: Tensor, ctx: AggregationContext) -> tuple[Tensor, Tensor]:
        w, d = to_device(w, x.device), x.shape[-1]
        value, weights = torch.empty_like(x[..., 0, :]), torch.zeros_like(w)
        middle = self.middle if x.ndim == 2 else self.middle_together
        slots = [slice(slot.start, slot.stop) for slot in ctx.layout.slots]
        for part in slots if self.per_layer else [slice(0, d)]:
            value[..., part], used = middle(x[..., part], w.double())
            weights += used.to(w.dtype) * ((part.stop - part.start) / d if self.per_layer else 1.0)
        return value, weights

    def middle(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Most often a few steps are enough. Where they are not, the products of all updates are computed,
        which takes as long as a few steps and gives the distance of each from every point between them; where
        that is too coarse, they are computed again."""
        weights = w / w.sum()
        far = _from_sum(x, weights).clamp_(min=self.smoothing)
        patience = 4 + len(x) // 25
        seen, look = None, patience
        for i in range(self.iterations):
            weights = w / far
            weights = weights / weights.sum()
            squares = None
            if seen is not None:
                between, exact = to_mixture(seen, weights)
                squares = between if bool(exact) else None
            if squares is None and i >= look:
                seen, look = seen_from(x, weighted(weights.to(x.dtype), x)), i + patience
                squares = seen.diagonal()
            now = _from_sum(x, weights) if squares is None else squares.sqrt()
            before, far = far, now.clamp_(min=self.smoothing)
            if bool(((far - before).abs() <= self.tolerance * before).all()):
                break
        return weighted(weights.to(x.dtype), x), weights

    def middle_together(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """The same for several experiments [c, n, d]; each goes through the steps that it would go through
        alone, and stands still once it is done."""
        weights = w / w.sum(dim=-1, keepdim=True)
        far = _from_sum(x, weights).clamp_(min=self.smoothing)
        patience, everyone = 4 + x.shape[1] // 25, range(len(x))
        goes_on, looked, look = [True] * len(x), [False] * len(x), [patience] * len(x)
        seen = x.new_zeros(0)
        for i in range(self.iterations):
            moving = _flags(goes_on, x)
            tried = w / far
            weights = torch.where(moving, tried / tried.sum(dim=-1, keepdim=True), weights)
            now, exact = far, [False] * len(x)
            if any(looked):
                squares, usable = to_mixture(seen, weights)
                exact = [had and good for had, good in zip(looked, usable.tolist(), strict=True)]
                now = torch.where(_flags(exact, x), squares.sqrt(), now)
            again = [goes_on[k] and not exact[k] and i >= look[k] for k in everyone]
            if any(again):
                fresh, chosen = seen_from(x, weighted(weights.to(x.dtype), x)), _flags(again, x)
                seen = torch.where(chosen[..., None], fresh, seen) if any(looked) else fresh
                now = torch.where(chosen, diagonal(fresh).sqrt(), now)
                looked = [had or new for had, new in zip(looked, again, strict=True)]
                look = [i + patience if again[k] else look[k] for k in everyone]
            step = [goes_on[k] and not exact[k] and not again[k] for k in everyone]
            if any(step):
                now = torch.where(_flags(step, x), _from_sum(x, weights), now)
            before, far = far, torch.where(moving, now.clamp(min=self.smoothing), far)
            settled = ((far - before).abs() <= self.tolerance * before).all(dim=-1).tolist()
            goes_on = [goes_on[k] and not settled[k] for k in everyone]
            if not any(goes_on):
                break
        return weighted(weights.to(x.dtype), x), weights


def _from_sum(x: Tensor, weights: Tensor) -> Tensor:
    """How far each row is from the sum of all by these weights."""
    return norms(x, weighted(weights.to(x.dtype), x))


def _flags(flags: list[bool], x: Tensor) -> Tensor:
    return to_device(torch.tensor(flags), x.device)[:, None]
