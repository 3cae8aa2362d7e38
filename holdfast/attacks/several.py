"""What attackers of several experiments see, as one stack: row by row what each of them sees in its
`View`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from holdfast.attacks.base import REACH, Attack, Knowledge, View, Whom
from holdfast.attacks.memory import Memory
from holdfast.core.columns import Columns, current
from holdfast.core.device import on_host, to_device
from holdfast.core.errors import RunError
from holdfast.core.keys import Key
from holdfast.core.one_memory import one_memory
from holdfast.core.together import stacked
from holdfast.core.types import Exchange, Schema, Uplink

LIMIT = 1 << 26
"""Numbers that are looked at as one stack: enough to keep a GPU busy, few enough for a copy in float64."""


@dataclass(frozen=True)
class Said:
    """What attackers send instead of their honest rows, and what a reader should know about it."""

    rows: Mapping[str, Tensor]
    notes: Sequence[str] = ()
    remembered: Mapping[str, Tensor] = field(default_factory=dict)
    """What they remember from now on."""
    partly: bool = False
    """Whether what is remembered of the updates has this process's columns only."""


@dataclass(frozen=True)
class Situation:
    """Attackers of one experiment that act together, and the replies that they are among."""

    attack: Attack
    task: str
    schema: Schema
    up: Uplink
    """Honest replies of the whole cohort."""
    rows: Tensor
    """Positions of these attackers among them."""
    attack_key: Key
    sent: Exchange | None = None
    trained: Uplink | None = None
    """What the own training of these attackers left."""
    before: Mapping[str, Tensor] = field(default_factory=dict)
    """What they remember."""

    @property
    def key(self) -> Key:
        """One for all attackers, or, where each acts alone, its own."""
        own = self.attack.knows == "own"
        return self.attack_key.fold(int(self.up.ids[self.rows[0]])) if own else self.attack_key

    @cached_property
    def cohort(self) -> int:
        return int(self.up.is_client.sum())

    def alike(self) -> tuple[object, ...]:
        """Situations for which this is equal can be looked at as one stack."""
        fields = [(name, self.up[name]) for name in self.attack.targets(self.schema)]
        seen = [(name, tuple(value.shape), value.dtype, value.device) for name, value in fields]
        return (
            self.task,
            tuple(self.schema.items()),
            tuple(seen),
            len(self.rows),
            self.cohort,
            self.sent is None,
            None if self.trained is None else tuple(self.trained.fields),
        )

    @property
    def numbers(self) -> int:
        """How many numbers are looked at."""
        n = len(self.rows) if self.attack.knows == "own" else len(self.up)
        shapes = [self.up[name].shape[1:] for name in self.attack.targets(self.schema)]
        return max(1, n * max(map(math.prod, shapes), default=1))

    def alone(self) -> Said:
        """Given no more than the attack declares to know, and never the server's own row."""
        clients, knows, sent = self.up.is_client, self.attack.knows, self.sent
        own = self.up.only(self.rows)
        seen, mine = own, torch.arange(len(self.rows))
        if REACH[knows] >= REACH["everyone"]:
            seen, mine = self.up.only(clients), self.rows - int((~clients).sum())
        trained, memory = self.trained, Memory(self.before)
        if not self.attack.works_on_device():
            own, seen = own.on_host(), seen.on_host()
            trained = None if trained is None else trained.on_host()
            sent, memory = sent and replace(sent, bank=sent.bank.cpu()), Memory(on_host(self.before))
        models = partial(first_models, sent, self.rows, self.up.columns)
        view = View(mine, seen, knows, self.cohort, models, trained_by_them=trained, memory=memory)
        rows = self.attack.uplink(self.task, self.schema, own, view, self.key)
        return Said(rows, view.notes, memory.fresh, current() is not None)


def first_models(sent: Exchange | None, rows: Tensor, columns: Columns | None = None) -> Tensor | None:
    """What these clients were sent; other clients may have been sent other models, which these do not see.
    Of a model that several processes share, its parameters in the columns of the updates."""
    if sent is None or not sent.pick.shape[1] or bool((sent.pick[rows, 0] < 0).any()):
        return None
    bank = sent.bank if columns is None else columns.mine(sent.bank[:, : columns.total])
    return bank[to_device(sent.pick[rows, 0], bank.device)]


class Uneven(Exception):
    """Some of the experiments have more rows to be used than others; `counts` says how many each has."""

    def __init__(self, counts: list[int]):
        super().__init__("experiments with unequal numbers of rows")
        self.counts = counts


class Views:
    """The views of attackers in several experiments that are alike: c experiments, m attackers in each. Where
    an attacker knows only itself, each attacker is taken for an experiment of its own."""

    def __init__(self, situations: Sequence[Situation]):
        first = situations[0]
        self.situations = situations
        self.knows: Knowledge = first.attack.knows
        self.cohort = first.cohort
        """How many clients answer in each experiment."""
        self.attackers = len(first.rows)
        self.mine = torch.stack([situation.rows for situation in situations])
        """[c, m]: positions of the attackers among all replies."""
        self.ids = torch.stack([situation.up.ids[situation.rows] for situation in situations])
        """[c, m]: who they are."""
        self.notes: list[str] = []
        self.fresh: dict[str, Tensor] = {}
        """What they remember from now on, [c, ...] each."""

    @cached_property
    def key(self) -> Key:
        """[c, 1]: the key of each experiment."""
        return Key(torch.stack([situation.key.bits for situation in self.situations])[:, None])

    def note(self, text: str) -> None:
        """Something a reader of each result should know."""
        self.notes.append(text)

    def own(self, field: str) -> Tensor:
        """[c, m, ...]: the attackers' honest rows."""
        return self._take(field, self.mine)

    def trained(self, field: str) -> Tensor | None:
        """[c, m, ...]: the attackers' rows as their own training left them."""
        if any(one.trained is None or field not in one.trained.fields for one in self.situations):
            return None
        return torch.stack([one.trained[field] for one in self.situations if one.trained is not None])

    def recall(self, name: str) -> Tensor | None:
        """[c, ...]: what the attackers of each experiment remember; None where none of them does."""
        found = [Memory(situation.before).recall(name) for situation in self.situations]
        known = [value for value in found if value is not None]
        if known and len(known) < len(found):
            raise Uneven([int(value is not None) for value in found])
        return torch.stack(known) if known else None

    def remember(self, name: str, values: Tensor, columns: bool = False) -> None:
        """Remember a tensor [c, ...], a row for the attackers of each experiment."""
        memory = Memory()
        memory.remember(name, values, columns)
        self.fresh |= memory.fresh

    def known(self, field: str, whom: Whom = "all") -> Tensor:
        """[c, k, ...]: honest rows to take statistics of, as `View.known` chooses them. The host waits for
        the device once, to know which rows are finite."""
        if REACH[self.knows] < REACH["colluders"]:
            raise RunError(f"attack takes statistics of others but declares to know only {self.knows}")
        rows = self._take(field, self._known(whom))
        flat = rows.flatten(2)
        if not flat.numel():
            return rows
        finite = torch.stack(torch.aminmax(flat, dim=2)).isfinite().all(0).cpu()
        finite |= ~finite.any(1, keepdim=True)  # where no row is finite, all are taken
        counts = finite.sum(1).tolist()
        if min(counts) < max(counts):
            raise Uneven(counts)
        if counts[0] == rows.shape[1]:
            return rows
        place = finite.nonzero()[:, 1] + torch.arange(len(rows)).repeat_interleave(counts[0]) * rows.shape[1]
        chosen = rows.flatten(0, 1).index_select(0, to_device(place, rows.device))
        return chosen.unflatten(0, (len(rows), counts[0]))

    def sent(self) -> Tensor | None:
        """[c, m, size]: the models that the attackers were sent."""
        models = [first_models(situation.sent, situation.rows) for situation in self.situations]
        found = [model for model in models if model is not None]
        return torch.stack(found) if len(found) == len(models) else None

    def _known(self, whom: Whom) -> Tensor:
        """[c, k]: positions of the rows, finite or not."""
        if REACH[self.knows] < REACH["everyone"]:
            return self.mine
        n = len(self.situations[0].up)
        everyone = torch.arange(n - self.cohort, n)  # the server's own row, if there is one, is the first
        if whom == "all" or self.attackers == self.cohort:
            return everyone.expand(len(self.mine), -1)
        others = torch.ones(len(self.mine), n, dtype=torch.bool).scatter_(1, self.mine, False)
        others[:, : n - self.cohort] = False
        return others.nonzero()[:, 1].view(len(self.mine), -1)

    def _take(self, field: str, rows: Tensor) -> Tensor:
        """[c, k, ...]: rows [c, k] of each reply. Whole replies that lie next to each other are not
        copied."""
        parts = [situation.up[field] for situation in self.situations]
        n = len(parts[0])
        if rows.shape[1] == n:
            return stacked(parts)
        whole, starts = one_memory(parts) or _copied(parts)
        chosen = whole.index_select(0, to_device((rows + starts[:, None]).flatten(), whole.device))
        return chosen.unflatten(0, tuple(rows.shape))


def _copied(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The same, of a copy. A part that stands there several times, because each of its attackers acts alone,
    is copied once."""
    places = {id(part): place for place, part in reversed(list(enumerate(parts)))}
    order = {place: number for number, place in enumerate(sorted(places.values()))}
    starts = torch.tensor([order[places[id(part)]] for part in parts]) * len(parts[0])
    return torch.cat([parts[place] for place in order]), starts


def said_together(situations: Sequence[Situation]) -> list[Said]:
    """What the attackers of all situations of one attack send, those that are alike as one stack."""
    groups: dict[object, list[int]] = {}
    for place, situation in enumerate(situations):
        groups.setdefault(situation.alike(), []).append(place)
    answers: dict[int, Said] = {}
    for places in groups.values():
        step = max(1, LIMIT // situations[places[0]].numbers)
        for start in range(0, len(places), step):
            piece = places[start : start + step]
            answers.update(zip(piece, _as_one([situations[place] for place in piece]), strict=True))
    return [answers[place] for place in range(len(situations))]


def _as_one(situations: Sequence[Situation]) -> list[Said]:
    first = situations[0]
    if len(situations) == 1:
        return [first.alone()]
    views = Views(situations)
    try:
        rows = first.attack.together(first.task, first.schema, views)
    except Uneven as uneven:
        answers: dict[int, Said] = {}
        for count in sorted(set(uneven.counts)):
            places = [place for place, found in enumerate(uneven.counts) if found == count]
            answers.update(zip(places, _as_one([situations[place] for place in places]), strict=True))
        return [answers[place] for place in range(len(situations))]
    if rows is None:
        return [situation.alone() for situation in situations]
    return [
        Said(_row(rows, place), views.notes, _row(views.fresh, place)) for place in range(len(situations))
    ]


def _row(stacks: Mapping[str, Tensor], place: int) -> dict[str, Tensor]:
    return {name: value[place] for name, value in stacks.items()}
