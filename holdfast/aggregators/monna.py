"""MoNNA: the mean of the n - f clients nearest to a vector that can be trusted (Farhadkhani et al., ICML
2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from holdfast.aggregators import ordered
from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of, separate, vectors
from holdfast.aggregators.geometry import norms, weighted
from holdfast.aggregators.ordered import equal_weights, lowest
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
from holdfast.core.registry import register, setting
from holdfast.core.types import State

PAPER = "Farhadkhani et al., Robust Collaborative Learning with Linear Gradient Overhead, ICML 2023"


@register("aggregator", "monna", paper=PAPER)
class MoNNA(Aggregator):
    """The mean of the n - f updates nearest to a reference.

    The paper has no server: every client averages those nearest to its own vector, which it can trust. A
    server has no vector of its own, so `reference` says what takes its place: the coordinate-wise median of
    all updates, the update of the server's own data ("root": needs data.root), or the update of one client
    that is known to be honest ("client": `trusted` is its id, as ByzFL's idx). The reference itself is
    averaged only where it is a client's. Where it is missing in a round (that client is absent, or the
    server's own update was refused), the median is the fallback. The paper's momentum is the clients'
    optimiser's. The weights returned are equal ones on the updates that were averaged."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": "mean of the n - f updates nearest to a reference, by default the median",
        "weights returned": "equal, on those averaged",
        "variants and options": (
            '`reference = "root"`: the update of the server\'s own data; `"client"`: that of the client '
            "`trusted`"
        ),
        "paper": "Farhadkhani et al. 2023",
    }
    reads: ClassVar[Reads] = "gram"
    uses_priors: ClassVar[bool] = False
    condition: ClassVar[str] = "n > 2f"
    keeps: ClassVar[frozenset[str]] = frozenset({"shift", "scale", "hull"})
    reference: Literal["median", "root", "client"] = setting("median", "which vector is trusted")
    trusted: int | None = setting(None, 'id of the trusted client, with reference = "client"', ge=0)

    @model_validator(mode="after")
    def _names_a_client(self) -> Self:
        if (self.reference == "client") != (self.trusted is not None):
            raise ValueError('reference = "client" and trusted, the id of that client, are set together')
        return self

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"root"}) if self.reference == "root" else frozenset()

    def least(self, f: int) -> int:
        return 2 * f + 1

    def idle(self) -> bool:
        return self.f is None

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed) or not self.has_reference(ctx):
            return self.fall_back(x, state, ctx)
        weights = self.nearest(x[None], [ctx])[0]
        return Reduced(weighted(weights, x), weights, state)

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced] | None:
        there = [self.has_reference(ctx) for ctx in contexts]
        if x.shape[1] < self.least(contexts[0].assumed) or not any(there):
            return self.fall_back_together(x, states, contexts)
        if not all(there):
            return None
        weights = self.nearest(x, contexts)
        return separate(weighted(weights, x), weights, states)

    def trusts(self) -> int | None:
        return self.trusted

    def has_reference(self, ctx: AggregationContext) -> bool:
        if self.reference == "root":
            return ctx.root is not None
        return self.reference == "median" or bool(self.is_trusted(ctx.ids).any())

    def is_trusted(self, ids: Tensor) -> Tensor:
        return torch.isin(ids, -1 if self.trusted is None else self.trusted)

    def nearest(self, x: Tensor, contexts: Sequence[AggregationContext]) -> Tensor:
        """The weights [c, n] of several experiments."""
        ids = ids_of(contexts)
        far = norms(x, self.references(x, ids, contexts))
        if self.reference == "client":  # nearest to itself, also where another one is equal
            far = far.masked_fill(to_device(self.is_trusted(ids), far.device), -1.0)
        return equal_weights(lowest(far, x.shape[1] - contexts[0].assumed, ids), x)

    def references(self, x: Tensor, ids: Tensor, contexts: Sequence[AggregationContext]) -> Tensor:
        """[c, d]"""
        if self.reference == "median":
            return ordered.median(x, ids)[0]
        if self.reference == "root":
            return vectors([ctx.root for ctx in contexts if ctx.root is not None], x)
        place = to_device(self.is_trusted(ids).to(torch.uint8).argmax(dim=-1), x.device)
        return x.take_along_dim(place[:, None, None], dim=1)[:, 0]
