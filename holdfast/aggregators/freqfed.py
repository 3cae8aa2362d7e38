"""FreqFed: clients whose models agree in the low frequencies (Fereidooni et al., NDSS 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of, separate, vectors
from holdfast.aggregators.clusters import by_density, directions_apart, largest_cluster
from holdfast.aggregators.geometry import weighted
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
from holdfast.core.flat import Layout, Slot
from holdfast.core.registry import register, setting
from holdfast.core.types import State

PAPER = (
    "Fereidooni et al., FreqFed: A Frequency Analysis-Based Approach for Mitigating Poisoning Attacks in"
    " Federated Learning, NDSS 2024"
)


@register("aggregator", "freqfed", paper=PAPER)
class FreqFed(Aggregator):
    """The weighted mean of the largest cluster of clients, by the low frequencies of their models.

    Each tensor of a client's model (`of = "update"`: of its update) goes through the discrete cosine
    transform (type II, orthonormal): a matrix along both of its dimensions, with all but the first flattened;
    a vector along its one. Of the coefficients those with i / rows + j / columns < `low` are kept, and those
    of all tensors are one vector for each client. HDBSCAN clusters the vectors by their cosine distances, and
    the largest cluster is averaged. A cluster has more than half of the clients, as in FLAME: smaller ones
    would let a minority of attackers be the largest. Where there is no such cluster, the median is the
    fallback. The weights returned are the incoming ones of that cluster, as shares. Assumes that what sets
    attackers apart shows in the low frequencies: what they do in the others passes. Costs a copy of the low
    frequencies, at most half of the updates, and time like d log d for each client."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": (
            "weighted mean of the largest cluster (HDBSCAN) by the cosines of the models' low frequencies"
        ),
        "weights returned": "the incoming ones of that cluster",
        "variants and options": (
            '`low`: which part of the frequencies is low; `of = "update"`: updates in place of models'
        ),
        "paper": "Fereidooni et al. 2024",
    }
    reads: ClassVar[Reads] = "rows"
    condition: ClassVar[str] = "n >= 3 and n > 2f"
    of: Literal["model", "update"] = setting(
        "model", "what is transformed: the clients' models (the paper's weights), or their updates"
    )
    low: float = setting(
        0.5, "which frequencies are low: up to this share of a tensor's dimensions, added up", gt=0, le=2
    )

    def least(self, f: int) -> int:
        return max(3, 2 * f + 1)

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        weights = chosen(self.apart(x, [ctx]).cpu(), w.cpu(), ctx.ids)
        if not bool(weights.any()):
            return self.fall_back(x, state, ctx)
        weights = to_device(weights, x.device)
        return Reduced(weighted(weights, x), weights, state)

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        if x.shape[1] < self.least(contexts[0].assumed):
            return self.fall_back_together(x, states, contexts)
        apart = self.apart(x, contexts).cpu()
        parts = [chosen(*of) for of in zip(apart, w.cpu(), ids_of(contexts), strict=True)]
        weights = to_device(torch.stack(parts), x.device)
        found = separate(weighted(weights, x), weights, states)
        return [
            result if bool(own.any()) else self.fall_back(*of)
            for result, own, *of in zip(found, parts, x, states, contexts, strict=True)
        ]

    def apart(self, x: Tensor, contexts: Sequence[AggregationContext]) -> Tensor:
        """[..., n, n]: the cosine distances of the low frequencies. The transform is linear: that of a model
        is that of the model sent and that of the update."""
        layout, centre = contexts[0].layout, None
        if self.of == "model":
            received = vectors([ctx.received for ctx in contexts], x)
            sent = low_frequencies(received[:, None], layout, self.low)[:, 0]
            centre = -(sent if x.ndim > 2 else sent[0])
        return directions_apart(low_frequencies(x, layout, self.low), centre)


def chosen(apart: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    """[n]: the weights of the largest cluster, as shares; all 0 where there is none."""
    members = largest_cluster(by_density(apart, ids, len(apart) // 2 + 1, single=True), ids)
    total = w[members].sum()
    if not bool(total > 0):
        return members.to(w.dtype) / max(1, int(members.sum()))
    return torch.where(members, w / total, 0)


def low_frequencies(x: Tensor, layout: Layout, low: float) -> Tensor:
    """[..., k]: the low frequencies of all tensors of the rows, tensor after tensor. A row at a time:
    transforms need a few copies of what they take."""
    slots = [slot for slot in layout.slots if slot.stop > slot.start]
    shapes = [_as_matrix(slot) for slot in slots]
    places = [to_device(_low_places(*shape, low), x.device) for shape in shapes]
    found = x.new_empty(*x.shape[:-1], sum(map(len, places)))
    for row, into in zip(x.flatten(0, -2), found.flatten(0, -2), strict=True):
        start = 0
        for slot, shape, kept in zip(slots, shapes, places, strict=True):
            turned = cosine_transform(row[slot.start : slot.stop].view(shape))
            turned = cosine_transform(turned.mT).mT if shape[0] > 1 else turned
            into[start : start + len(kept)] = turned.reshape(-1)[kept]
            start += len(kept)
    return found


def _as_matrix(slot: Slot) -> tuple[int, int]:
    """Rows and columns: a vector is one row."""
    rows = slot.shape[0] if len(slot.shape) > 1 else 1
    return rows, (slot.stop - slot.start) // rows


def _low_places(rows: int, columns: int, low: float) -> Tensor:
    """The places of the low frequencies in a matrix, row after row."""
    heights, widths = torch.arange(rows) / rows, torch.arange(columns) / columns
    return ((heights[:, None] + widths) < low).flatten().nonzero().flatten()


def cosine_transform(x: Tensor) -> Tensor:
    """The orthonormal discrete cosine transform (type II) along the last dimension of length N, by a Fourier
    transform of the even places and then the odd ones backwards (Makhoul, IEEE TASSP 1980)."""
    size = x.shape[-1]
    turned = torch.fft.fft(torch.cat([x[..., ::2], x[..., 1::2].flip(-1)], dim=-1))
    angle = torch.arange(size, device=x.device, dtype=x.dtype) * (-math.pi / (2 * size))
    found = turned.real * angle.cos() - turned.imag * angle.sin()
    scale = torch.full((size,), math.sqrt(2 / size), device=x.device, dtype=x.dtype)
    scale[0] = math.sqrt(1 / size)
    return found * scale
