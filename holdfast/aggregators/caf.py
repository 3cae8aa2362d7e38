"""CAF, the covariance bound-agnostic filter: clients lose weight along the direction in which all spread most
(Allouah, Guerraoui and Stephan, ICML 2025, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of, separate
from holdfast.aggregators.geometry import weighted
from holdfast.aggregators.spectrum import from_the_middle, widest
from holdfast.core.columns import Reads
from holdfast.core.registry import register
from holdfast.core.types import State

PAPER = (
    "Allouah, Guerraoui and Stephan, Towards Trustworthy Federated Learning with Untrusted Participants, ICML"
    " 2025"
)
_ROUNDING = 1e-9


@register("aggregator", "caf", paper=PAPER)
class CAF(Aggregator):
    """Of several weighted means the one with the smallest leading eigenvalue of the covariance; each takes
    weight from those farthest out along the leading eigenvector.

    From c_i = 1 on, as long as the sum of c is above n - 2f: the mean and the covariance by c, its leading
    eigenvector v, t_i = ((x_i - mean) v)^2, and c_i <- c_i (1 - t_i / max t), where the maximum is over
    clients with weight left (ByzFL's is over all, so that one without weight can stop the filter). No bound
    on the honest covariance has to be known. The eigenvectors come from the products [n, n] of the updates,
    to rounding; ByzFL takes one step of the power method from a random vector. The weights returned are c of
    that mean, as shares."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": (
            "takes weight from clients along the direction of largest spread until n - 2f is left; the mean "
            "with the smallest leading eigenvalue"
        ),
        "weights returned": "those of the filter, as shares",
        "paper": "Allouah et al. 2025",
    }
    reads: ClassVar[Reads] = "gram"
    uses_priors: ClassVar[bool] = False
    condition: ClassVar[str] = "n > 2f"
    keeps: ClassVar[frozenset[str]] = frozenset({"shift", "scale", "hull"})

    def least(self, f: int) -> int:
        return 2 * f + 1

    def idle(self) -> bool:
        return self.f is None

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        weights = filtered(from_the_middle(x, ctx.ids), ctx.assumed).to(x.dtype)
        return Reduced(weighted(weights, x), weights, state)

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        if x.shape[1] < self.least(contexts[0].assumed):
            return self.fall_back_together(x, states, contexts)
        weights = filtered(from_the_middle(x, ids_of(contexts)), contexts[0].assumed).to(x.dtype)
        return separate(weighted(weights, x), weights, states)


def filtered(seen: Tensor, f: int) -> Tensor:
    """The weights with the smallest leading eigenvalue, as shares. Each step leaves at least one client
    without weight, so there are at most n."""
    n = seen.shape[-1]
    left = chosen = torch.ones_like(seen[..., 0])
    goes_on = torch.ones_like(left[..., :1], dtype=torch.bool)
    smallest = torch.full_like(left[..., :1], torch.inf)
    for _ in range(n):
        total = left.sum(dim=-1, keepdim=True)
        goes_on = goes_on & (total > n - 2 * f + _ROUNDING)
        if not bool(goes_on.any()):
            break
        size, along = widest(seen, left / total)
        better = goes_on & (size[..., None] < smallest * (1 - _ROUNDING))
        smallest, chosen = torch.where(better, size[..., None], smallest), torch.where(better, left, chosen)
        most = torch.where(left > 0, along, 0).amax(dim=-1, keepdim=True)
        goes_on = goes_on & (most > 0)
        left = torch.where(goes_on, left * (1 - along / most).clamp(min=0), left)
    return chosen / chosen.sum(dim=-1, keepdim=True)
