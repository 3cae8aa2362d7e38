"""What an attack is: hooks on the data and on the replies of malicious clients, with a declared and enforced view of the others.

Only the simulator holds an `Adversary`. Nothing that is handed to a server rule leads to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.core.errors import ConfigError, RunError, suggest
from holdfast.core.keys import Key
from holdfast.core.registry import Part, setting
from holdfast.core.types import Schema, Uplink
from holdfast.data.federation import Federation

Knowledge = Literal["own", "colluders", "everyone", "defence"]
_OF_SAMPLES, _OF_TABLE = ("classes", "train_rows", "mean", "std"), ("row", "label", "start")
_REACH = {"own": 0, "colluders": 1, "everyone": 2, "defence": 3}


@dataclass(frozen=True)
class View:
    """What the attackers see of a round: always their own honest replies; more only where the attack declares that it knows more."""

    mine: Tensor
    """Positions of the malicious clients among the rows of `up`."""
    up: Uplink
    """Honest replies: everybody's where the attack knows everyone, else only the attackers'."""
    knows: Knowledge

    def own(self, field: str) -> Tensor:
        """The attackers' honest rows: a single one where the attack knows only its own."""
        return self.up[field][self.mine]

    def colluders(self, field: str) -> Tensor:
        self._need("colluders")
        return self.up[field][self.mine]

    def everyone(self, field: str) -> Tensor:
        """All clients' honest rows."""
        self._need("everyone")
        return self.up[field]

    def _need(self, level: Knowledge) -> None:
        if _REACH[self.knows] < _REACH[level]:
            raise RunError(f"attack reads what {level} sent but declares to know only {self.knows}; set attack.knows = \"{level}\"")


class Attack(Part):
    """Changes what malicious clients train on (`data`) or send (`uplink`). The default does nothing."""

    tasks: ClassVar[frozenset[str]] = frozenset({"train"})
    kinds: ClassVar[frozenset[str]] = frozenset({"update"})
    fraction: float = setting(0.3, "share of the clients that are malicious", ge=0, le=1)
    clients: tuple[int, ...] | None = setting(None, "the malicious clients by id, instead of a share")
    knows: Knowledge = setting("own", "what the attackers see: own, colluders, everyone, defence")

    def data(self, federation: Federation, malicious: Tensor, key: Key) -> Federation:
        """The federation with other training tables for malicious clients. Changed inputs are scratch rows appended to `samples`; the rows
        that were there, and all other tables, stay as they are."""
        return federation

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        """New rows [number of attackers, ...] for some fields; `up` has the attackers' honest replies, `view` whatever else they know.
        Where they know only their own, it is called for one attacker at a time."""
        return {}


class Adversary:
    """The ground truth of one experiment: who is malicious, and what they do about it."""

    def __init__(self, attack: Attack | None, members: Tensor, key: Key):
        self.attack, self.key = attack, key
        self.malicious = self._draw(attack, members, key)

    @staticmethod
    def _draw(attack: Attack | None, members: Tensor, key: Key) -> Tensor:
        """A fixed set of those that may train, drawn once: int(share * members) of them."""
        if attack is None:
            return torch.zeros(0, dtype=torch.int64)
        if attack.clients is not None:
            unknown = [c for c in attack.clients if c not in members.tolist()]
            if unknown:
                raise ConfigError(f"attack.clients: no client {unknown[0]} that trains; ids go from 0 to {int(members.max())}")
            return torch.tensor(sorted(set(attack.clients)), dtype=torch.int64)
        order = torch.argsort(key.fold("malicious").fold(members).bits, stable=True)
        return members[order[: int(attack.fraction * len(members) + 1e-9)]].sort().values  # 0.29 * 100 is 28.999...

    def benign(self, ids: Tensor) -> Tensor:
        """bool per id."""
        return ~torch.isin(ids, self.malicious)

    def poison_data(self, federation: Federation) -> Federation:
        if self.attack is None or not len(self.malicious):
            return federation
        versions = _versions(federation)
        poisoned = self.attack.data(federation, self.malicious, self.key.fold("data"))
        problem = "data in place" if _versions(federation) != versions else self._overreach(federation, poisoned)
        if problem:
            raise RunError(f"attack '{self.attack.name}' changed {problem}; only what malicious clients train on is its to change")
        return poisoned

    def _overreach(self, before: Federation, after: Federation) -> str:
        """What of the federation an attack changed that is not its own."""
        kept = len(before.samples)
        for name in ("x", "y"):
            if not _same(getattr(before.samples, name), getattr(after.samples, name)[:kept]):
                return f"samples that were there before (their {name})"
        if any(getattr(before.samples, name) != getattr(after.samples, name) for name in _OF_SAMPLES):
            return "what the dataset says of itself"
        for name in ("validation", "test", "global_test", "root"):
            old, new = getattr(before, name), getattr(after, name)
            if not all(_same(getattr(old, part), getattr(new, part)) for part in _OF_TABLE):
                return f"the table '{name}'"
        if after.clients != before.clients or after.held_out != before.held_out:
            return "who the clients are"
        for client in self.benign(torch.arange(before.clients)).nonzero().flatten().tolist():
            if not all(map(torch.equal, before.train.client(client), after.train.client(client))):
                return f"the data of client {client}, which is not malicious"
        return ""

    def poison(self, task: str, schema: Schema, up: Uplink, key: Key) -> Uplink:
        """The replies as the malicious clients send them; only their rows and only the declared kinds of field can change."""
        mine = torch.isin(up.ids, self.malicious).nonzero().flatten()
        if self.attack is None or task not in self.attack.tasks or not len(mine):
            return up
        knows, fields = self.attack.knows, dict(up.fields)
        for rows in mine.split(1) if knows == "own" else (mine,):
            own = up.only(rows)
            view = View(rows, up, knows) if _REACH[knows] >= _REACH["everyone"] else View(torch.arange(len(rows)), own, knows)
            changed = self.attack.uplink(task, schema, own, view, key.fold(int(own.ids[0])) if knows == "own" else key)
            for name, value in changed.items():
                self._check_field(task, schema, name)
                if fields[name] is up[name]:
                    fields[name] = up[name].clone()
                fields[name][rows] = value.to(up[name].dtype)
        return replace(up, fields=fields)

    def _check_field(self, task: str, schema: Schema, name: str) -> None:
        assert self.attack is not None
        if name not in schema:
            raise RunError(f"attack '{self.attack.name}' sends '{name}', which task '{task}' does not have{suggest(name, schema)}")
        if schema[name].kind not in self.attack.kinds:
            raise RunError(f"attack '{self.attack.name}' may not touch '{name}', which is of kind {schema[name].kind}")


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a, b)


def _versions(federation: Federation) -> list[int]:
    """PyTorch counts the writes to a tensor; a change in place would reach every experiment that shares the samples."""
    tables = (federation.train, federation.validation, federation.test, federation.global_test, federation.root)
    tensors = [getattr(table, part) for table in tables for part in _OF_TABLE]
    return [tensor._version for tensor in (federation.samples.x, federation.samples.y, *tensors)]
