"""The small frozen records that cross a boundary between server and clients. Rows are always sorted by client
id."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from holdfast.core.columns import Columns
from holdfast.core.device import on_host
from holdfast.core.together import Computation

T = TypeVar("T")
State = dict[str, Tensor]
"""What a server or a stack of clients remembers: names to tensors; a client's tensors have one row per
client."""

Kind = Literal["update", "model", "feature", "score", "scalar", "count", "buffer"]

ROOT = -1
"""The pseudo-client that trains on the server's own data, for rules that need a trusted update."""

UNDEFINED = -1.0
"""For a figure that a client does not have, such as the AUC of one class only: what clients send is refused
where it is not finite."""

UPDATE = "update"
"""The field that aggregators reduce; of all fields it alone may be shared by several processes."""
EVALUATE = "evaluate"
"""The task of an evaluation: what a client's models score on its own samples."""
SCORE = "score"
"""The task of a committee member, whatever the method: test the received models on the client's own
validation samples."""


@dataclass(frozen=True)
class Field:
    """One thing a client sends: its shape, what it means, and the bounds of a valid value.

    The kind drives screening, byte counting, the wire encoding, what an attack may poison and what an
    aggregator reduces."""

    kind: Kind
    shape: tuple[int, ...] = ()
    low: float | None = None
    high: float | None = None
    dtype: torch.dtype | None = None
    """None: the network's own."""
    of_samples: bool = False
    """Whether it counts some of the client's own training samples, such as those of a class: in a federation
    it is bounded by the number of samples that the client can have."""


Schema = Mapping[str, Field]
"""What a task's reply looks like: field names to fields."""


@dataclass(frozen=True)
class Exchange:
    """A request to some clients: client `to[i]` receives the models `bank[pick[i]]` (-1: none), so a
    broadcast is a bank of one row.

    `extra` holds further tensors with one row per client. `step` numbers the exchanges of one round. With
    `discard_state`, which evaluation may need, clients answer as always but keep no new state."""

    task: str
    to: Tensor
    bank: Tensor
    pick: Tensor
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    step: int = 0
    discard_state: bool = False

    def __post_init__(self) -> None:
        n = self.to.shape[0]
        if self.pick.shape[0] != n or self.pick.ndim != 2 or self.bank.ndim != 2:
            raise ValueError(
                f"exchange '{self.task}': {n} clients, bank {tuple(self.bank.shape)}, pick"
                f" {tuple(self.pick.shape)}"
            )
        if self.pick.numel() and not -1 <= int(self.pick.min()) <= int(self.pick.max()) < self.bank.shape[0]:
            raise ValueError(
                f"exchange '{self.task}': picks {int(self.pick.min())}..{int(self.pick.max())} of"
                f" {self.bank.shape[0]} models"
            )
        if n > 1 and not bool((self.to[1:] > self.to[:-1]).all()):
            raise ValueError(f"exchange '{self.task}': clients must be sorted by id, each once")
        if any(value.shape[0] != n for value in self.extra.values()):
            raise ValueError(f"exchange '{self.task}': every extra tensor needs one row per client")

    @property
    def is_client(self) -> Tensor:
        """bool per row: false for the server's own pseudo-client."""
        return self.to != ROOT

    def sent_to(self, ids: Tensor) -> Tensor:
        """[n, size]: the first model that each of these clients is sent."""
        return self.bank[self.pick[torch.searchsorted(self.to, ids), 0]]

    def only(self, keep: Tensor) -> Exchange:
        """The same request to fewer clients; `keep` is a mask or positions."""
        return replace(
            self, to=self.to[keep], pick=self.pick[keep], extra={k: v[keep] for k, v in self.extra.items()}
        )

    def bytes_down(self) -> Tensor:
        """Bytes each client receives: its models and its extra rows."""
        models = (self.pick >= 0).sum(1) * self.bank.shape[1] * self.bank.element_size()
        extra = sum(value[:1].numel() * value.element_size() for value in self.extra.values())
        return models + extra


@dataclass(frozen=True)
class Uplink:
    """What came back: one row per client that answered and passed screening; `refused` has the others, with
    reasons. Where several processes share the replies, `columns` says which of the columns of the field
    "update" are here; all other fields are whole."""

    ids: Tensor
    fields: Mapping[str, Tensor]
    refused: Mapping[int, str] = field(default_factory=dict)
    columns: Columns | None = None

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    @property
    def is_client(self) -> Tensor:
        """bool per row: false for the server's own pseudo-client."""
        return self.ids != ROOT

    def clients(self) -> Uplink:
        """The replies without that of the server's own pseudo-client."""
        return self.only(self.is_client)

    def of(self, ids: Tensor) -> Uplink:
        """The replies of these clients, and that of the server's own pseudo-client where there is one."""
        return self.only(torch.isin(self.ids, ids) | ~self.is_client)

    def having(self, **fields: Tensor) -> Uplink:
        """The same replies with these fields in place of, or beside, their own."""
        return replace(self, fields={**self.fields, **fields})

    def on_host(self) -> Uplink:
        """The same in the host's memory."""
        return replace(self, fields=on_host(self.fields))

    def only(self, keep: Tensor) -> Uplink:
        """The rows of a mask; all of them are not copied."""
        if keep.dtype == torch.bool and bool(keep.all()):
            return self
        return replace(self, ids=self.ids[keep], fields={k: v[keep] for k, v in self.fields.items()})

    def bytes_up(self) -> Tensor:
        """Bytes each client sent."""
        size = sum(self._width(name) * value.element_size() for name, value in self.fields.items())
        return torch.full_like(self.ids, int(size))

    def _width(self, name: str) -> int:
        """How many numbers of a field a client sent."""
        if self.columns is not None and name == UPDATE and len(self):
            return self.columns.total
        return self.fields[name][:1].numel()

    def whole(self) -> Uplink:
        """The same with all columns on every process."""
        if self.columns is None:
            return self
        return replace(self.having(**{UPDATE: self.columns.whole(self[UPDATE])}), columns=None)


@dataclass(frozen=True)
class Verdict:
    """What the server decided about each client in one round. It is stored, so that every rule can be
    evaluated as a detector.

    `scores` are suspicions, one per id: more is worse. `banned` is for good, `rejected` for this round.
    `tables` are any other tensors for pictures; `norms` is always there: the length of each client's
    update."""

    ids: Tensor
    weights: Tensor | None = None
    scores: Mapping[str, Tensor] = field(default_factory=dict)
    banned: Mapping[int, str] = field(default_factory=dict)
    rejected: Mapping[int, str] = field(default_factory=dict)
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    fallback: bool = False


Steps = Generator[Exchange | Computation, Any, T]
"""A generator that asks clients: it yields Exchanges, is sent their Uplinks, and returns a T. It may also
yield a Computation, and is sent its result: a GPU computes what several experiments ask for together."""
Round = Steps[tuple[State, Verdict]]
"""A round of a method's server half: it returns the new state and the verdict."""


def broadcast(task: str, model: Tensor, to: Tensor, **extra: Tensor) -> Exchange:
    """A request with one model for all clients."""
    return Exchange(task, to, model[None], torch.zeros(len(to), 1, dtype=torch.int64), extra)


def nothing(task: str, to: Tensor, dtype: torch.dtype = torch.float32, **extra: Tensor) -> Exchange:
    """A request that carries no model."""
    return Exchange(
        task, to, torch.zeros(0, 0, dtype=dtype), torch.zeros(len(to), 0, dtype=torch.int64), extra
    )


def without_unused_models(exchange: Exchange) -> Exchange:
    """The same request without the models that none of its clients receives."""
    used, place = exchange.pick.clamp(min=0).unique(return_inverse=True)
    if exchange.bank.shape[0] <= 1 or not len(used):
        return exchange
    return replace(
        exchange, bank=exchange.bank[used], pick=torch.where(exchange.pick >= 0, place, exchange.pick)
    )
