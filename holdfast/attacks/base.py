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
        """The attackers' honest rows; an attack that knows only its own treats each row by itself."""
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
        """The federation with poisoned training tables; must leave the tables of others alone."""
        return federation

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        """New rows [number of attackers, ...] for some fields; `up` has the attackers' honest replies, `view` whatever else they know."""
        return {}


class Adversary:
    """The ground truth of one experiment: who is malicious, and what they do about it."""

    def __init__(self, attack: Attack | None, clients: int, key: Key):
        self.attack, self.key = attack, key
        self.malicious = self._draw(attack, clients, key)

    @staticmethod
    def _draw(attack: Attack | None, clients: int, key: Key) -> Tensor:
        """A fixed set, drawn once: int(share * clients) of them."""
        if attack is None:
            return torch.zeros(0, dtype=torch.int64)
        if attack.clients is not None:
            unknown = [c for c in attack.clients if not 0 <= c < clients]
            if unknown:
                raise ConfigError(f"attack.clients: no client {unknown[0]}; there are {clients}, from 0")
            return torch.tensor(sorted(set(attack.clients)), dtype=torch.int64)
        order = torch.argsort(key.fold("malicious").hash(clients), stable=True)
        return order[: int(attack.fraction * clients + 1e-9)].sort().values  # 0.29 * 100 is 28.999...

    def benign(self, ids: Tensor) -> Tensor:
        """bool per id."""
        return ~torch.isin(ids, self.malicious)

    def poison_data(self, federation: Federation) -> Federation:
        if self.attack is None or not len(self.malicious):
            return federation
        poisoned = self.attack.data(federation, self.malicious, self.key.fold("data"))
        for client in range(federation.clients):
            before, after = federation.train.client(client), poisoned.train.client(client)
            if client not in self.malicious and not all(map(torch.equal, before, after)):
                raise RunError(f"attack '{self.attack.name}' changed the data of client {client}, which is not malicious")
        return poisoned

    def poison(self, task: str, schema: Schema, up: Uplink, key: Key) -> Uplink:
        """The replies as the malicious clients send them; only their rows and only the declared kinds of field can change."""
        mine = torch.isin(up.ids, self.malicious).nonzero().flatten()
        if self.attack is None or task not in self.attack.tasks or not len(mine):
            return up
        own, all_ids = up.only(mine), _REACH[self.attack.knows] >= _REACH["everyone"]
        view = View(mine, up, self.attack.knows) if all_ids else View(torch.arange(len(mine)), own, self.attack.knows)
        changed = self.attack.uplink(task, schema, own, view, key)
        fields = dict(up.fields)
        for name, rows in changed.items():
            if name not in schema:
                raise RunError(f"attack '{self.attack.name}' sends '{name}', which task '{task}' does not have{suggest(name, schema)}")
            if schema[name].kind not in self.attack.kinds:
                raise RunError(f"attack '{self.attack.name}' may not touch '{name}', which is of kind {schema[name].kind}")
            fields[name] = up[name].clone()
            fields[name][mine] = rows.to(up[name].dtype)
        return replace(up, fields=fields)
