"""LASA, layer-adaptive sparsified aggregation: clients whose tensor has an unusual length or share of
positive signs are left out of that tensor (Xu, Zhang and Hu, WACV 2025)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.aggregators import ordered
from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of, separate
from holdfast.aggregators.geometry import blocks, norms, weighted
from holdfast.core.flat import Layout, Slot
from holdfast.core.registry import register, setting
from holdfast.core.types import State

PAPER = (
    "Xu, Zhang and Hu, Achieving Byzantine-Resilient Federated Learning via Layer-Adaptive Sparsified Model"
    " Aggregation, WACV 2025"
)
_ROUNDING = 1e-9


@register("aggregator", "lasa", paper=PAPER)
class LASA(Aggregator):
    """Updates are shortened to their median length and lose their smallest entries; then each tensor is the
    mean over the clients that are usual in it by length and by direction.

    Of each client the share `sparsity` of smallest entries becomes zero. In a tensor, a client's length is
    |x| and its direction (1 + (positive - negative entries) / entries that are left) / 2. A client is usual
    where |value - median| <= radius * standard deviation for both. Where none is, the tensor is the median of
    the updates and the round counts as a fallback (the authors' code takes all). `variant = "authors"` is
    otherwise their code: only tensors of two or four axes become sparse, entries equal to the smallest one
    that stays go, too, and a client at the radius is left out. The weights returned are the share of
    coordinates in which a client was averaged, among all that were; lengths are not in them."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": (
            "shortened and sparsified updates; each tensor is the mean of clients with a usual length and "
            "share of positive signs in it"
        ),
        "weights returned": "share of the coordinates averaged",
        "variants and options": (
            '`sparsity`, `length_radius`, `sign_radius`; `variant = "authors"`: only matrices and kernels '
            "become sparse"
        ),
        "paper": "Xu et al. 2025",
    }
    uses_priors: ClassVar[bool] = False
    condition: ClassVar[str] = "n > 2f"
    keeps: ClassVar[frozenset[str]] = frozenset({"scale"})
    variant: Literal["paper", "authors"] = setting(
        "paper", "paper: all tensors become sparse; authors: matrices and kernels do"
    )
    sparsity: float = setting(0.3, "share of each update's entries that become zero", ge=0, lt=1)
    length_radius: float = setting(
        1.0, "how unusual a length may be, in standard deviations from the median", gt=0
    )
    sign_radius: float = setting(
        1.0, "how unusual a share of positive signs may be, in standard deviations from the median", gt=0
    )

    def least(self, f: int) -> int:
        return 2 * f + 1

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        value, weights, fell = self.by_tensor(x, ctx.ids, ctx.layout)
        return Reduced(value, weights, state, fallback=bool(fell))

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        if x.shape[1] < self.least(contexts[0].assumed):
            return self.fall_back_together(x, states, contexts)
        value, weights, fell = self.by_tensor(x, ids_of(contexts), contexts[0].layout)
        return separate(value, weights, states, fell.tolist())

    def by_tensor(self, x: Tensor, ids: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """The aggregate, the weights, and whether a tensor had no usual client."""
        length = norms(x)
        shrink = (length.quantile(0.5, dim=-1, keepdim=True) / length).nan_to_num_(nan=1.0).clamp_(max=1)
        smallest = self.smallest(x, layout)
        value, weights = torch.empty_like(x[..., 0, :]), torch.zeros_like(x[..., 0])
        fell = torch.zeros(x.shape[:-2], dtype=torch.bool, device=x.device)
        for slot in layout.slots:
            part = x[..., slot.start : slot.stop]
            least = smallest if self.sparse(slot) else None
            share, none = self.shares(part, least, shrink)
            taken = torch.empty_like(part[..., 0, :])
            for columns, entries in self.entries(part, least):
                taken[..., columns] = weighted(share * shrink.to(x.dtype), entries)
            if bool(none.any()):
                middle, of_middle = ordered.median(part, ids)
                taken = torch.where(none[..., None], middle, taken)
                share = torch.where(none[..., None], of_middle, share)
            value[..., slot.start : slot.stop] = taken
            weights += share * ((slot.stop - slot.start) / layout.size)
            fell |= none
        return value, weights, fell

    def shares(self, part: Tensor, least: Tensor | None, shrink: Tensor) -> tuple[Tensor, Tensor]:
        """Of a tensor: equal shares of the usual clients, and whether there is none."""
        squares, signs, left = (torch.zeros_like(shrink) for _ in range(3))
        for _, entries in self.entries(part, least):
            squares += entries.double().square().sum(dim=-1)
            signs += entries.sign().sum(dim=-1)
            left += (entries != 0).sum(dim=-1)
        direction = (1 + (signs / left).nan_to_num_(nan=0.0)) / 2
        usual = self.within(squares.sqrt_() * shrink, self.length_radius)
        usual = usual & self.within(direction, self.sign_radius)
        count = usual.sum(dim=-1, keepdim=True)
        return (usual.double() / count.clamp(min=1)).to(part.dtype), count[..., 0] == 0

    def within(self, values: Tensor, radius: float) -> Tensor:
        """Which clients lie within the radius; equal values do, whatever rounding makes of them."""
        median = values.quantile(0.5, dim=-1, keepdim=True)
        off, limit = (values - median).abs(), radius * values.std(dim=-1, correction=0, keepdim=True)
        strict = 1 - _ROUNDING if self.variant == "authors" else 1 + _ROUNDING
        return (off <= limit * strict) | (off <= _ROUNDING * median.abs())

    def sparse(self, slot: Slot) -> bool:
        """Whether a tensor loses its smallest entries."""
        return self.sparsity > 0 and (self.variant == "paper" or len(slot.shape) in (2, 4))

    def smallest(self, x: Tensor, layout: Layout) -> Tensor | None:
        """[..., n, 1]: the smallest entry of each client that stays, without its sign. One client at a time,
        so that there is no copy of all updates."""
        slots = [slot for slot in layout.slots if self.sparse(slot)]
        total = sum(slot.stop - slot.start for slot in slots)
        if not total:
            return None
        place, found = total - max(1, int(total * (1 - self.sparsity))) + 1, []
        for row in x.reshape(-1, x.shape[-1]):
            entries = row if total == len(row) else torch.cat([row[slot.start : slot.stop] for slot in slots])
            found.append(entries.abs().kthvalue(place).values)
        return torch.stack(found).view(*x.shape[:-1], 1)

    def entries(self, part: Tensor, least: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
        """The entries of a tensor, block of columns by block, with 0 where an entry does not stay."""
        for columns in blocks(part):
            entries = part[..., columns]
            if least is not None:
                size = entries.abs()
                stays = size > least if self.variant == "authors" else size >= least
                entries = torch.where(stays, entries, 0)
            yield columns, entries
