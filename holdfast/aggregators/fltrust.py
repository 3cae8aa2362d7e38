"""FLTrust: each update counts by how well its direction agrees with the server's own (Cao et al., NDSS 2021,
Algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, separate, vectors
from holdfast.aggregators.geometry import along, norms, weighted
from holdfast.core.columns import Reads
from holdfast.core.registry import register, setting
from holdfast.core.types import State

PAPER = "Cao et al., FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping, NDSS 2021"


@register("aggregator", "fltrust", paper=PAPER)
class FLTrust(Aggregator):
    """Updates are brought to the length of the server's own one and averaged by trust: the cosine to it,
    where that is positive.

    Needs data.root, a small clean set the server trains on like a client; any number of attackers is
    tolerated, as long as that set resembles the clients' data. If no client is trusted, the update is zero;
    if the server's own update is refused, the median is the fallback. `variant = "authors"` brings only the
    first tensor to length, as FedCAP's code does. The weights returned are the shares of trust."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": "updates brought to the root update's length, averaged by their cosine to it",
        "weights returned": "shares of trust",
        "variants and options": (
            '`variant = "authors"`: only the first tensor is brought to length (FedCAP\'s code)'
        ),
        "paper": "Cao et al. 2021",
    }
    needs: ClassVar[frozenset[str]] = frozenset({"root"})
    uses_priors: ClassVar[bool] = False
    variant: Literal["paper", "authors"] = setting(
        "paper", "paper: the whole update gets the root's length; authors: its first tensor does"
    )

    @property
    def reads(self) -> Reads:  # type: ignore[override]
        return "rows" if self.variant == "authors" else "gram"  # a process has parts of tensors

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if ctx.root is None:  # the server's own training failed the screening
            return self.fall_back(x, state, ctx)
        return Reduced(*self.trusted(x, vectors([ctx.root], x)[0], ctx), state)

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced] | None:
        roots = [ctx.root for ctx in contexts if ctx.root is not None]
        if not roots:
            return self.fall_back_together(x, states, contexts)
        if len(roots) < len(contexts):
            return None
        return separate(*self.trusted(x, vectors(roots, x), contexts[0]), states)

    def trusted(self, x: Tensor, root: Tensor, ctx: AggregationContext) -> tuple[Tensor, Tensor]:
        length, own = norms(x), norms(root[..., None, :])
        trust = (along(x, root) / (length * own)).nan_to_num_(nan=0.0).clamp_(0, 1)
        total = trust.sum(dim=-1, keepdim=True)
        shares = torch.where(total > 0, trust / total, trust)
        scaled = (shares * own / length).nan_to_num_(nan=0.0, posinf=0.0).to(x.dtype)
        weights = shares.to(x.dtype)
        if self.variant == "authors":
            first = ctx.layout.slots[0].stop
            parts = [weighted(scaled, x[..., :first]), weighted(weights, x[..., first:])]
            return torch.cat(parts, dim=-1), weights
        return weighted(scaled, x), weights
