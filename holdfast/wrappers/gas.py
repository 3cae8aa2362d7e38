"""GAS (Liu et al., ICML 2023): the rule inside only helps to score clients, on small groups of coordinates.

In a long vector a poisoned update hides in the noise of all coordinates. GAS splits the coordinates into
random groups, asks the rule for its aggregate of each group, scores a client by its distance from these
aggregates, and averages the n - f clients of the lowest scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of, separate, vectors
from holdfast.aggregators.geometry import CUDA_BLOCK, weighted
from holdfast.aggregators.ordered import equal_weights, lowest
from holdfast.core.device import to_device
from holdfast.core.errors import ConfigError
from holdfast.core.flat import Layout, Slot
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.together import stacked
from holdfast.core.types import State
from holdfast.wrappers.base import Around, need_f, reduce_each

PAPER = "Liu et al., Byzantine-Robust Learning on Heterogeneous Data via Gradient Splitting, ICML 2023"
NUMBERS = 1 << 22
"""How many numbers of the updates are handled at once: enough to keep a machine busy, little beside the
input."""


@register("wrapper", "gas", paper=PAPER)
class GradientSplitting(Around):
    """Averages the n - f clients nearest to the rule's aggregates of p random groups of coordinates; a new
    split in every round.

    Every client counts once, as in the paper: sample counts are ignored. The rule inside assumes at most as
    many attackers as it can tolerate, (n - 3) // 2 in Krum's case. A cohort of no more than f clients is
    averaged whole, and the round counts as a fallback."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what the rule sees": "one of `p` random groups of coordinates at a time",
        "what comes out": "the mean of the n - f clients nearest to the rule's aggregates of all groups",
        "from": "Liu et al., ICML 2023",
    }
    p: int = setting(1000, "groups of coordinates; a shorter vector has one coordinate in each", ge=1)

    def check(self, inner: Aggregator) -> None:
        need_f(self, inner)
        if "assess" in inner.needs:
            raise ConfigError(
                f"aggregator.wrap: '{inner.name}' tests models, but 'gas' shows it groups of coordinates,"
                " which are none; leave one of them out"
            )
        if inner.remembers():
            raise ConfigError(
                f"aggregator.wrap: '{inner.name}' keeps a memory, but the groups of 'gas' are others in every"
                " round; leave 'gas' out or switch that memory off"
            )
        if inner.layers()[0].in_places:
            raise ConfigError(
                f"aggregator.wrap: '{inner.name}' needs whole models, but 'gas' hands it groups of"
                " coordinates; leave 'gas' out"
            )

    def uses_priors(self, inner: Aggregator) -> bool:
        return False

    def condition(self, inner: Aggregator) -> str:
        return "n > f"

    def least(self, inner: Aggregator, f: int) -> int:
        return f + 1

    def reduce(
        self, inner: Aggregator, x: Tensor, w: Tensor, state: State, ctx: AggregationContext
    ) -> Reduced:
        if x.device.type != "cpu":  # all groups at once, in place of thousands of small kernels
            return self.reduce_together(inner, x[None], w[None], [state], [ctx])[0]
        n, d = x.shape
        keep, even = n - ctx.assumed, x.new_full((n,), 1 / n)
        if keep < 1:
            return Reduced(even @ x, even, state, fallback=True)
        key, fallback = ctx.key.fold("gas"), False
        inside = replace(ctx, key=key, assumed=bearable(inner, n, ctx.assumed))
        score = torch.zeros(n, dtype=torch.float64, device=x.device)
        for columns in groups(key.hash(d).argsort(), min(self.p, d), n):
            part = x[:, columns]
            found, fell = per_group(inner, part, columns, even, inside)
            score += torch.linalg.vector_norm(part - found, dim=2, dtype=torch.float64).sum(
                1
            )  # float32 cannot square 1e30
            fallback |= fell
        weights = equal_weights(lowest(score, keep, ctx.ids), x)
        return Reduced(weights @ x, weights, state, fallback)

    def reduce_together(
        self,
        inner: Aggregator,
        x: Tensor,
        w: Tensor,
        states: Sequence[State],
        contexts: Sequence[AggregationContext],
    ) -> list[Reduced]:
        (c, n, d), f = x.shape, contexts[0].assumed
        if n - f < 1:
            even = x.new_full((c, n), 1 / n)
            return separate(weighted(even, x), even, states, [True] * c)
        key = Key(torch.stack([ctx.key.bits for ctx in contexts])).fold("gas")
        told = bearable(inner, n, f)
        inside = [
            replace(ctx, key=Key(own), assumed=told) for ctx, own in zip(contexts, key.bits, strict=True)
        ]
        score = torch.zeros(c, n, dtype=torch.float64, device=x.device)
        fell = [False] * c
        for columns in groups(key.to(x.device).hash(d).argsort(dim=-1), min(self.p, d), n):
            every = columns.flatten(1)
            part = x.gather(-1, every[:, None].expand(-1, n, -1)).view(c, n, *columns.shape[1:])
            found, fallbacks = per_group_together(inner, part, columns, inside)
            score += torch.linalg.vector_norm(part - found[:, None], dim=-1, dtype=torch.float64).sum(-1)
            fell = [had or new for had, new in zip(fell, fallbacks, strict=True)]
        weights = equal_weights(lowest(score, n - f, ids_of(contexts)), x)
        return separate(weighted(weights, x), weights, states, fell)


def bearable(inner: Aggregator, n: int, f: int) -> int:
    """The most attackers, up to f, with which a cohort of n meets the rule's condition."""
    return next((told for told in range(f, 0, -1) if inner.least(told) <= n), 0)


def groups(order: Tensor, p: int, n: int) -> Iterator[Tensor]:
    """The split: columns [..., k, size] of k groups at a time. Sizes differ by one at most, so that groups of
    one size are handled together."""
    *several, d = order.shape
    rows = n * math.prod(several)
    numbers = NUMBERS if order.device.type == "cpu" else max(NUMBERS, min(CUDA_BLOCK, rows * d // 4))
    size, longer = divmod(d, p)
    start = longer * (size + 1)
    for piece, width in ((order[..., :start], size + 1), (order[..., start:], size)):
        if piece.shape[-1]:
            split = piece.unflatten(-1, (-1, width))
            yield from split.split(max(1, numbers // (rows * width)), dim=-2)


def per_group(
    inner: Aggregator, part: Tensor, columns: Tensor, w: Tensor, ctx: AggregationContext
) -> tuple[Tensor, bool]:
    """The rule's aggregates [k, size] of the groups part[:, i], and whether it had to fall back.

    Group by group, because most rules look at numbers to decide what to do next, which no stack of groups
    allows; for those that do not, vmap was slower from 100 clients on."""
    if inner.coordinatewise:  # then groups make no difference
        found = within(inner, part.flatten(1), columns.flatten(), w, ctx)
        return found.value.view(columns.shape), found.fallback
    each = [within(inner, part[:, i], group, w, ctx) for i, group in enumerate(columns)]
    return torch.stack([found.value for found in each]), any(found.fallback for found in each)


def per_group_together(
    inner: Aggregator, part: Tensor, columns: Tensor, contexts: Sequence[AggregationContext]
) -> tuple[Tensor, list[bool]]:
    """The same for several experiments, part [c, n, k, size]: to the rule, each group of each of them is an
    experiment of its own. Returns [c, k, size], and which experiments fell back."""
    c, n, k, size = part.shape
    split = 1 if inner.coordinatewise else k
    rows = part.flatten(2)[:, None] if split == 1 else part.transpose(1, 2).contiguous()
    columns = columns.view(c, split, -1)
    received = (
        vectors([ctx.received for ctx in contexts], part).gather(-1, columns.flatten(1)).view_as(columns)
    )
    roots: list[Tensor | None] = [
        None if ctx.root is None else to_device(ctx.root, part.device) for ctx in contexts
    ]
    layout = _one_tensor(columns.shape[-1], part.dtype)
    inside = [
        replace(ctx, layout=layout, received=start, root=None if root is None else root[own])
        for ctx, root, starts, its in zip(contexts, roots, received, columns, strict=True)
        for start, own in zip(starts, its, strict=True)
    ]
    even = part.new_full((len(inside), n), 1 / n)
    found = reduce_each(inner, rows.flatten(0, 1), even, [inner.init(layout)] * len(inside), inside)
    fell = [any(each.fallback for each in found[e * split : (e + 1) * split]) for e in range(c)]
    return stacked([each.value for each in found]).view(c, k, size), fell


def within(inner: Aggregator, x: Tensor, columns: Tensor, w: Tensor, ctx: AggregationContext) -> Reduced:
    """The rule on some coordinates; they come from everywhere, so they count as one tensor."""
    layout = _one_tensor(len(columns), x.dtype)
    root = None if ctx.root is None else ctx.root[columns]
    return inner(
        x, w, inner.init(layout), replace(ctx, layout=layout, received=ctx.received[columns], root=root)
    )


def _one_tensor(size: int, dtype: torch.dtype) -> Layout:
    return Layout((Slot("group", (size,), 0, size, dtype, buffer=False, frozen=False),))
