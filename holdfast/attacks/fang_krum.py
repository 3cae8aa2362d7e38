"""Fang's attack on Krum: as far against the model's way as Krum still chooses it (Fang et al., USENIX
Security 2020, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from holdfast.aggregators.geometry import mean, only, over_columns
from holdfast.aggregators.krum import closest
from holdfast.attacks.base import REACH, Attack, Knowledge, View
from holdfast.attacks.distances import column_blocks
from holdfast.attacks.fang_trim import PAPER
from holdfast.attacks.several import Views
from holdfast.attacks.shared_rows import lengths, normal
from holdfast.core.columns import Reads, current
from holdfast.core.device import to_device
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import Schema, Uplink

_SMALLEST = 1e-5  # the paper's threshold: a lambda below it counts as none
_NONE = "fang-krum: Krum would choose no crafted update, so attackers send their own"


class Table(NamedTuple):
    """All that Krum asks about the known updates x and a crafted one -lambda s, for any lambda: one pass over
    the updates is enough. Float64, on the host, with a leading axis for the experiments."""

    pairs: Tensor
    """[c, n, n]: distances between the known updates, squared or not; infinite on the diagonal."""
    squares: Tensor
    """[c, n]: their squared lengths."""
    along: Tensor
    """[c, n]: their products with s."""
    length: Tensor
    """[c]: of s, squared."""
    d: int
    """How many numbers an update has."""
    power: float
    """1: distances are squared; 0.5: they are not, in `pairs` and in Krum."""


@register("attack", "fang-krum", paper=PAPER)
class FangKrum(Attack):
    """Sends -lambda s, with s the signs of the update that the server would take without an attack, and the
    largest lambda of a halving search at which Krum takes a crafted update.

    The search starts at the paper's bound, sqrt(min_i of the sum of squared distances of i to its n - f - 2
    nearest benign ones / ((n - 2f - 1) d)) + max_i |x_i| / sqrt(d), and ends below 1e-5: then attackers send
    their own. One attacker sends -lambda s, the others the same with noise of a length up to `epsilon`, so
    that they vouch for each other. Full knowledge (`knows = "everyone"`): Krum is tried on the benign updates
    and f crafted ones, and s is that of Krum's own choice. Partial knowledge (`knows = "colluders"`): on the
    attackers' own honest updates with one crafted update, then two, and so on up to f; s is that of their
    mean. The paper does not say what Krum is then told of the number of attackers: here as many as are
    crafted. `variant = "authors"` is the released code: s of the mean of all, and distances that are not
    squared in the bound and in Krum."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "sends minus the signs of the update, as long as Krum still takes it",
        "settings, with their defaults": "`epsilon = 0.01`",
    }
    tasks: ClassVar[None] = None
    reads: ClassVar[Reads] = "gram"
    least: ClassVar[Knowledge] = "colluders"
    knows: Knowledge = setting(
        "everyone", "everyone: the paper's full knowledge; colluders: its partial knowledge"
    )
    epsilon: float = setting(0.01, "longest noise by which crafted updates differ", ge=0)
    variant: Literal["paper", "authors"] = setting(
        "paper", "authors: signs of the mean, and distances that are not squared"
    )

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        out = {}
        for name in self.targets(schema):
            s, found = self._crafted(view.known(name)[None], view.known(name, "benign")[None], len(up))
            if not bool(found > 0):
                view.note(_NONE)
                continue
            noise = self._noise(key.fold(name).fold(up.ids), s[0], len(up))
            out[name] = noise - float(found) * s
        return out

    def together(self, task: str, schema: Schema, views: Views) -> Mapping[str, Tensor] | None:
        out = {}
        for name in self.targets(schema):
            s, found = self._crafted(views.known(name), views.known(name, "benign"), views.attackers)
            if not bool((found > 0).all()):
                return None  # those that stay honest note it, each for itself
            noise = self._noise(views.key.fold(name).fold(views.ids), s, views.attackers)
            out[name] = noise - to_device(found.to(s.dtype), s.device)[:, None, None] * s[:, None]
        return out

    def _crafted(self, everyone: Tensor, benign: Tensor, attackers: int) -> tuple[Tensor, Tensor]:
        """s [c, d], and lambda [c], 0 where none is found."""
        sees_all, n = REACH[self.knows] >= REACH["everyone"], everyone.shape[1]
        if sees_all and self.variant == "paper" and n > 2:
            ids = torch.arange(n).expand(len(everyone), -1)
            s = closest(everyone, ids, min(attackers, n - 3))[0].sign()
        else:
            s = mean(everyone).sign()
        power = 1 if self.variant == "paper" else 0.5
        table, found = _table(benign, s, power), torch.zeros(len(s), dtype=torch.float64)
        for crafted in (attackers,) if sees_all else range(1, attackers + 1):
            found = torch.where(found > 0, found, _longest(table, crafted))
        return s, found

    def _noise(self, luck: Key, like: Tensor, attackers: int) -> Tensor:
        """[..., attackers, d]: for the first attacker none, for each other one a vector of random length."""
        keys = Key(to_device(luck.bits, like.device))
        noise = normal(keys, like.shape[-1], dtype=like.dtype)
        reach = self.epsilon * keys.fold("length").uniform(1, dtype=like.dtype)
        reach = torch.where(torch.arange(attackers, device=like.device)[:, None] > 0, reach, 0)
        return noise * (reach / lengths(noise).clamp(min=1e-30))


def _table(x: Tensor, s: Tensor, power: float) -> Table:
    c, n, width = x.shape
    zero = torch.zeros(c, n + 1, n + 1, dtype=torch.float64, device=x.device)

    def of(columns: slice) -> Tensor:
        found, mine, way = zero.clone(), only(x, columns), only(s, columns)
        for part in column_blocks(mine.shape[-1], c * n):
            block = torch.cat([mine[..., part], way[:, None, part]], 1).double()
            found += block @ block.mT
        return found

    gram, shared = over_columns(zero, of).cpu(), current()
    squares = gram.diagonal(dim1=1, dim2=2)[:, :n]
    pairs = (squares[:, :, None] + squares[:, None] - 2 * gram[:, :n, :n]).clamp(min=0).pow(power)
    pairs.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    d = width if shared is None else shared.total
    return Table(pairs, squares, gram[:, :n, n], gram[:, n, n], d, power)


def _longest(table: Table, crafted: int) -> Tensor:
    """[c]: the first of bound, bound / 2, bound / 4 ... at which Krum takes a crafted update; 0 where that
    falls below 1e-5."""
    n = table.pairs.shape[1]
    near = table.pairs.sort(dim=2).values[..., : max(0, n - 2)].sum(2).amin(1)
    room, squared = max(1, n - crafted - 1), table.power == 1
    first = (near / (room * table.d)).sqrt() if squared else near / (room * table.d**0.5)
    gamma = first + (table.squares.amax(1) / table.d).sqrt()
    found, going = torch.zeros_like(gamma), gamma.isfinite() & (gamma >= _SMALLEST)
    while bool(going.any()):
        taken = going & _taken(table, gamma, crafted)
        found = torch.where(taken, gamma, found)
        gamma = gamma / 2
        going = going & ~taken & (gamma >= _SMALLEST)
    return found


def _taken(table: Table, gamma: Tensor, crafted: int) -> Tensor:
    """bool [c]: whether Krum, told of so many attackers, scores the crafted updates best, which are equal.
    Where another is as good, it is not counted on."""
    c, n = table.along.shape
    count = max(1, n - 2)  # n + crafted updates less as many attackers and two
    far = table.squares + 2 * gamma[:, None] * table.along + (gamma**2 * table.length)[:, None]
    far = far.clamp(min=0).pow(table.power)
    own = torch.cat([far, far.new_zeros(c, crafted - 1)], 1)
    theirs = torch.cat([table.pairs, far[:, :, None].expand(-1, -1, crafted)], 2)
    score, best = (of.sort(-1).values[..., :count].sum(-1) for of in (own, theirs))
    return score < best.amin(1)
