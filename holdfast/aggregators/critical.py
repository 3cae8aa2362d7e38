"""Critical parameters (FedCPA, Han et al., ICCV 2023, section 5): which entries matter most and least to a
model's last change, and how far models agree on them.

The importance of an entry is |change * value| (Eq. 4). A model's critical sets are its k entries of greatest
and of least importance; two models agree as far as these sets overlap and rank what they have in common alike
(Eq. 5). Sets are a hundredth of the model, so everything after their selection is cheap beside it: models are
looked at one by one, and no second copy of them is ever made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from holdfast.core.flat import Layout

Array = np.ndarray[Any, Any]
Correlation = Literal["spearman", "pearson"]
_SAMPLE = 64
"""One entry in so many is sampled to estimate where the k-th lies; only entries beyond that are examined
twice."""
_ENTRIES = 1 << 18
"""How many entries of critical sets are compared at once: enough to make Python's share small, few enough for
a processor's cache."""


def spans_of(layout: Layout, min_dims: int) -> list[slice]:
    """The columns of tensors with so many dimensions, neighbours joined; where no tensor has (a part of a
    model may be all biases), of all tensors. What is frozen never changes: it would fill the sets of least
    importance, so it is left out."""
    slots = [slot for slot in layout.slots if not slot.buffer and not slot.frozen]
    chosen = [slot for slot in slots if len(slot.shape) >= min_dims] or slots or list(layout.slots)
    spans: list[slice] = []
    for slot in chosen:
        if spans and spans[-1].stop == slot.start:
            spans[-1] = slice(spans[-1].start, slot.stop)
        else:
            spans.append(slice(slot.start, slot.stop))
    return spans


def importance(
    row: Tensor,
    to_model: Tensor | None,
    to_change: Tensor | None,
    spans: list[slice],
    out: Tensor | None = None,
) -> Tensor:
    """|change * value| (Eq. 4) of the columns in question. `row` plus `to_model` is the model, `row` plus
    `to_change` its change (none: nothing is to be added), so that neither a caller with updates nor one with
    models needs a copy of all of them.
    """
    if out is None:
        out = row.new_empty(sum(span.stop - span.start for span in spans))
    at = 0
    for span in spans:
        part = out[at : at + span.stop - span.start]
        change = row[span] if to_change is None else row[span] + to_change[span]
        part.copy_(row[span]) if to_model is None else torch.add(row[span], to_model[span], out=part)
        part.mul_(change).abs_()
        at += len(part)
    return out


def extreme(p: Tensor, k: int, largest: bool) -> Tensor:
    """The k entries of largest or smallest importance, the most extreme first; among equal ones the lower
    index is taken. On a device all are sorted: the host does not wait to know how many lie beyond a limit."""
    if p.device.type != "cpu":
        return (-p if largest else p).sort(stable=True).indices[:k]
    index = _candidates(p, k, largest)
    value = -p[index] if largest else p[index]
    limit = value.topk(k, largest=False, sorted=False).values.amax()
    beyond = (value < limit).nonzero().flatten()
    level = (value == limit).nonzero().flatten()[: k - len(beyond)]
    chosen = torch.cat([beyond, level])
    return index[chosen[value[chosen].argsort(stable=True)]]


def _candidates(p: Tensor, k: int, largest: bool) -> Tensor:
    """Ascending indices that hold the k extreme entries: a few more than k where a sample of p shows where to
    look, else all."""
    sample = p[::_SAMPLE]
    rank = k // _SAMPLE + k // (4 * _SAMPLE) + 32
    if rank < len(sample) // 2:
        edge = sample.topk(rank, largest=largest, sorted=False).values
        found = (p >= edge.amin()) if largest else (p <= edge.amax())
        index = found.nonzero().flatten()
        if len(index) >= k:
            return index
    return torch.arange(len(p), device=p.device)


@dataclass(frozen=True)
class Sets:
    """One critical set for each model, one after the other: entries [total] and their importances, the most
    extreme first, and where each set begins. Equally important entries of a set are a tie: which entries are
    tied, and the first and last place of each one's tie."""

    entry: Array
    value: Array
    start: Array
    tied: Array
    first: Array
    last: Array

    @classmethod
    def of(cls, sets: list[tuple[Tensor, Tensor]]) -> Sets:
        entry, value = (torch.cat(list(column)).cpu().numpy() for column in zip(*sets, strict=True))
        start = np.cumsum([0, *(len(one) for one, _ in sets)])
        fresh = np.ones(len(entry) + 1, dtype=bool)
        fresh[1:-1] = value[1:] != value[:-1]
        fresh[start] = True
        begins = np.flatnonzero(fresh)
        length = np.diff(begins)
        first = np.repeat(begins[:-1], length)
        return cls(
            entry, value, start, np.repeat(length > 1, length), first, first + np.repeat(length - 1, length)
        )

    def __len__(self) -> int:
        return len(self.start) - 1


def critical_sets(importances: Iterable[Tensor], k: int, nonzero: bool = False) -> tuple[Sets, Sets]:
    """The top and bottom sets of models whose importances come one after the other. `nonzero`: entries
    without any importance belong to no set, which may then be smaller than k."""
    top: list[tuple[Tensor, Tensor]] = []
    bottom: list[tuple[Tensor, Tensor]] = []
    for p in importances:
        some = p.nonzero().flatten() if nonzero else None
        seen = p if some is None else p[some]
        for sets, largest in ((top, True), (bottom, False)):
            chosen = (
                extreme(seen, min(k, len(seen)), largest)
                if len(seen)
                else seen.new_zeros(0, dtype=torch.int64)
            )
            sets.append((chosen if some is None else some[chosen], seen[chosen]))
    return Sets.of(top), Sets.of(bottom)


def agreement(sets: Sets, correlation: Correlation, undefined: float) -> Tensor:
    """[n, n] in float64: the Jaccard similarity of every two sets plus their normalised correlation (rho + 1)
    / 2 on what they have in common. `undefined` replaces the latter where fewer than two entries are common,
    or a side finds all of them equally important."""
    n, entry = len(sets), _renumbered(sets.entry)
    found = np.full((n, n), 2.0)
    place = np.full(
        int(entry.max(initial=-1)) + 1, -1, dtype=np.int32
    )  # the place of an entry in the set of i
    for i in range(n - 1):
        mine = entry[sets.start[i] : sets.start[i + 1]]
        place[mine] = np.arange(len(mine), dtype=np.int32)
        for first, last in _row_blocks(sets.start, i + 1):
            found[i, first:last] = found[first:last, i] = _with_others(
                sets, entry, place, i, first, last, correlation, undefined
            )
        place[mine] = -1
    return torch.from_numpy(found)


def _renumbered(entry: Array) -> Array:
    """Only entries of some set have numbers, in the same order: tables of them then fit the processor's
    cache."""
    used = np.zeros(int(entry.max(initial=-1)) + 1, dtype=bool)
    used[entry] = True
    return (np.cumsum(used, dtype=np.int64) - 1)[entry]


def _row_blocks(start: Array, first: int) -> Iterator[tuple[int, int]]:
    while first < len(start) - 1:
        last = max(first + 1, int(np.searchsorted(start, start[first] + _ENTRIES, side="right")) - 1)
        yield first, last
        first = last


def _with_others(
    sets: Sets,
    entry: Array,
    place: Array,
    i: int,
    first: int,
    last: int,
    correlation: Correlation,
    undefined: float,
) -> Array:
    """Set i against the sets first .. last - 1, all pairs at once: what a pair has in common is in the other
    set's order, pair after pair."""
    low, high = sets.start[first], sets.start[last]
    at = place.take(entry[low:high])
    both = np.flatnonzero(at >= 0)
    at = at.take(both)
    start = sets.start[first : last + 1] - low
    bounds = np.searchsorted(both, start)
    count = np.diff(bounds)
    both += low
    if correlation == "spearman":
        middle = np.repeat(bounds[:-1] + (count - 1) / 2, count)
        a, b = _places_in(sets, i, at, count) - middle, _places(sets, both) - middle
    else:
        a, b = (
            _centred(v.astype(np.float64), bounds) for v in (sets.value[sets.start[i] + at], sets.value[both])
        )
    with np.errstate(invalid="ignore", divide="ignore"):
        rho = _sums(a * b, bounds) / np.sqrt(_sums(a * a, bounds) * _sums(b * b, bounds))
    normalised = np.where(np.isfinite(rho) & (count > 1), (np.clip(rho, -1, 1) + 1) / 2, undefined)
    union = np.diff(start) + sets.start[i + 1] - sets.start[i] - count
    return count / np.maximum(union, 1) + normalised


def _places(sets: Sets, both: Array) -> Array:
    """The common entries are in order: their places are their ranks, and tied ones, which are adjacent, share
    the mean of theirs."""
    rank = np.arange(len(both), dtype=np.float64)
    tied = np.flatnonzero(sets.tied.take(both))
    if len(tied):
        tie = sets.first.take(both.take(tied))
        begins = np.flatnonzero(np.concatenate([[True], tie[1:] != tie[:-1]]))
        length = np.diff(begins, append=len(tied))
        rank[tied] = np.repeat(tied[begins] + (length - 1) / 2, length)
    return rank


def _places_in(sets: Sets, i: int, at: Array, count: Array) -> Array:
    """The same for set i, in whose order the common entries are not: they are at its places `at`. A running
    count over a table of all its places, one row for each pair, ranks them without sorting."""
    low, size = sets.start[i], sets.start[i + 1] - sets.start[i]
    row = np.repeat(np.arange(len(count)) * size, count)
    key = row + at
    table = np.zeros(len(count) * size + 1, dtype=np.int32)  # the count of those before each place
    table[key + 1] = 1
    before = np.cumsum(table, dtype=np.int32)
    rank = before.take(key).astype(np.float64)
    tied = np.flatnonzero(sets.tied[low : low + size].take(at))
    if len(tied):
        which = low + at[tied]
        offset = row[tied] - low
        rank[tied] = (before[offset + sets.first[which]] + before[offset + sets.last[which] + 1] - 1) / 2
    return rank


def _sums(values: Array, bounds: Array) -> Array:
    """Of each pair's values; numpy's own way takes empty pairs for single ones."""
    out, some = np.zeros(len(bounds) - 1), bounds[1:] > bounds[:-1]
    if some.any():
        out[some] = np.add.reduceat(values, bounds[:-1][some])
    return out


def _centred(values: Array, bounds: Array) -> Array:
    """Without their pair's mean; values that are all equal but for rounding become zero, so that they have no
    correlation."""
    count = np.diff(bounds)
    out = values - np.repeat(_sums(values, bounds) / np.maximum(count, 1), count)
    flat = _sums(out * out, bounds) <= 1e-26 * _sums(values * values, bounds)
    return np.where(np.repeat(flat, count), 0.0, out)
