"""FLTrust: each update counts by how well its direction agrees with the server's own (Cao et al., NDSS 2021,
Algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.aggregators.geometry import blocks, norms
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

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if ctx.root is None:  # the server's own training failed the screening
            return self.fall_back(x, state, ctx)
        length, own = norms(x), norms(ctx.root[None])
        products = torch.zeros_like(length)
        for columns in blocks(x):
            products += x[:, columns].double() @ ctx.root[columns].double()
        trust = (products / (length * own)).nan_to_num_(nan=0.0).clamp_(0, 1)
        shares = trust / trust.sum() if bool(trust.sum() > 0) else trust
        scaled = (shares * own / length).nan_to_num_(nan=0.0, posinf=0.0).to(x.dtype)
        weights = shares.to(x.dtype)
        if self.variant == "authors":
            first = ctx.layout.slots[0].stop
            return Reduced(torch.cat([scaled @ x[:, :first], weights @ x[:, first:]]), weights, state)
        return Reduced(scaled @ x, weights, state)
