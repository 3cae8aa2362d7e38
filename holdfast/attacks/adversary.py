"""Which clients of an experiment are malicious, and what they do: the ground truth, which only the simulator
has. Nothing that a server rule is given leads here."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from holdfast.attacks.base import Attack
from holdfast.attacks.class_means import Vote, votes
from holdfast.attacks.data_poisoning import owners, with_trigger
from holdfast.attacks.false_numbers import lie
from holdfast.attacks.memory import Memories, owner_of, whole
from holdfast.attacks.moving_trigger import MovingTrigger, waiting_for
from holdfast.attacks.own_training import Crew, OwnTraining
from holdfast.attacks.replies import NewRows, Written
from holdfast.attacks.several import Said, Situation
from holdfast.attacks.target import Target
from holdfast.attacks.triggered import Triggered
from holdfast.core.columns import sharing
from holdfast.core.device import to_device
from holdfast.core.errors import ConfigError, RunError, suggest
from holdfast.core.keys import Key
from holdfast.core.together import Computation, alone
from holdfast.core.types import UPDATE, Exchange, Schema, Uplink, without_unused_models
from holdfast.data.federation import ClientRows, Federation, Samples

_OF_SAMPLES, _OF_TABLE = ("classes", "train_rows", "mean", "std"), ("row", "label", "start")


@dataclass(frozen=True, eq=False)
class Poisoned:
    """The data after an attack changed it. Experiments that differ in their defence only share it: changed
    inputs are a copy of the whole store, and cells are trained together where their store is the same one."""

    honest: Samples  # kept so that its id, by which this is found, stays its own
    federation: Federation
    triggered: Triggered | None = None
    moving: MovingTrigger | None = None


class Acting(NamedTuple):
    """Attackers that act together, on rows of updates or on their means of one class."""

    situation: Situation
    owner: str
    """Whose memory they use."""
    means: str = ""
    vote: Vote | None = None


_POISONED: WeakValueDictionary[str, Poisoned] = WeakValueDictionary()


class Adversary:
    """The ground truth of one experiment: which clients are malicious, and what they do."""

    def __init__(self, attack: Attack | None, members: Tensor, key: Key, names: Sequence[str] = ()):
        self.attack, self.members, self.key, self.names = attack, members, key, names
        self.malicious = self._draw(key.fold("malicious"))
        """All clients that are malicious at any time; where the set is redrawn, all clients may be."""
        self.triggered: Triggered | None = None
        """The test samples with the trigger in them, labelled as its target; known once the data is
        poisoned."""
        self.memories = Memories()
        """What the attackers remember from round to round."""
        self.moving: MovingTrigger | None = None
        """The trigger, where attackers train it: then those are the samples without it."""
        self.honest: Federation | None = None
        """The data before it was poisoned."""
        self._poisoned: Poisoned | None = None
        self._table: tuple[int, ClientRows] | None = None
        self.target = Target()
        """What is attacked; the experiment says so once it is built."""
        self._notes: list[str] = []
        if self.redraws and len(self.malicious):
            self.malicious = members

    @property
    def redraws(self) -> bool:
        return self.attack is not None and self.attack.redraw

    def at(self, round: int) -> Tensor:
        """The clients that are malicious in a round."""
        return self._draw(self.key.fold("malicious", round)) if self.redraws else self.malicious

    def _draw(self, key: Key) -> Tensor:
        """int(share * members) of those that may train, or those that are named."""
        attack, members = self.attack, self.members
        if attack is None:
            return torch.zeros(0, dtype=torch.int64)
        if attack.clients is not None:
            wanted_clients = [self._number(client) for client in attack.clients]
            unknown = [c for c in wanted_clients if c not in members.tolist()]
            if unknown:
                raise ConfigError(
                    f"attack.clients: no client {unknown[0]} that trains; ids go from 0 to"
                    f" {int(members.max())}"
                )
            return torch.tensor(sorted(set(wanted_clients)), dtype=torch.int64)
        order = torch.argsort(key.fold(members).bits, stable=True)
        wanted = int(attack.fraction * len(members) + 1e-9)  # 0.29 * 100 is 28.999...
        if attack.fraction and not wanted:
            raise ConfigError(
                f"attack.fraction: {attack.fraction:g} of {len(members)} clients rounds to 0 attackers;"
                f" raise it, or name them in attack.clients"
            )
        return members[order[:wanted]].sort().values

    def _number(self, client: int | str) -> int:
        """The number of a client that is named by it or by its name."""
        if isinstance(client, str) and client in self.names:
            return self.names.index(client)
        if isinstance(client, str) and not client.isdecimal():
            known = suggest(client, self.names) if self.names else "; the clients have no names"
            raise ConfigError(f"attack.clients: there is no client '{client}'{known}")
        return int(client)

    def benign(self, ids: Tensor, round: int = 0) -> Tensor:
        """bool per id."""
        return ~torch.isin(ids, self.at(round))

    def poison_data(self, federation: Federation, test: str = "test") -> Federation:
        """What the clients of this experiment train on. `test` names the table whose samples get the trigger,
        where there is one."""
        self.honest = federation
        if self.attack is None or not len(self.malicious):
            return federation
        about = (type(self.attack), repr(self.attack.settings()), self.malicious.tolist(), self.key, test)
        name = f"{id(federation.samples)} {federation.digest} {about}"
        self._poisoned = _POISONED.get(name) or self._poison_data(federation, test)
        _POISONED[name] = self._poisoned
        self.triggered, self.moving = self._poisoned.triggered, self._poisoned.moving
        return self._poisoned.federation

    def _poison_data(self, federation: Federation, test: str) -> Poisoned:
        assert self.attack is not None
        poisoned = self._data(federation, self.malicious, self.key.fold("data"))
        moving = self.attack.moving(federation.samples)
        if moving is not None:
            return Poisoned(
                federation.samples, poisoned, waiting_for(moving, getattr(federation, test)), moving
            )
        trigger = self.attack.planted(federation.samples)
        if trigger is None:
            return Poisoned(federation.samples, poisoned)
        return Poisoned(federation.samples, *with_trigger(poisoned, getattr(federation, test), trigger))

    def _data(self, federation: Federation, malicious: Tensor, key: Key) -> Federation:
        assert self.attack is not None
        versions = _versions(federation)
        poisoned = self.attack.data(federation, malicious, key)
        return self._checked(federation, poisoned, _versions(federation) != versions)

    def _checked(
        self, before: Federation, after: Federation, in_place: bool = False, same_samples: bool = False
    ) -> Federation:
        assert self.attack is not None
        problem = "data in place" if in_place else self._overreach(before, after)
        if same_samples and after.samples is not before.samples:
            # they are on a device already, and a round is not the time to move them
            problem = "samples within a run"
        if problem:
            raise RunError(
                f"attack '{self.attack.name}' changed {problem}; it may only change what malicious"
                f" clients train on"
            )
        return after

    def train(self, poisoned: Federation, round: int) -> ClientRows:
        """The training table of a round: the poisoned one, except for clients that are benign in this
        round."""
        honest = self.honest
        if self.attack is None or honest is None or not len(self.malicious):
            return poisoned.train
        if self._table is None or self._table[0] != round:
            malicious = self.at(round)
            versions = _versions(honest)
            fresh = self.attack.round_data(honest, malicious, self.key.fold("data"), round)
            in_place = _versions(honest) != versions
            table = poisoned.train
            if fresh is not None or in_place:
                table = self._checked(honest, fresh or honest, in_place, same_samples=True).train
            self._table = round, _mixed(honest.train, table, malicious) if self.redraws else table
        return self._table[1]

    def _overreach(self, before: Federation, after: Federation) -> str:
        """What an attack changed in the federation without permission."""
        kept = len(before.samples)
        for name in ("x", "y"):
            if not _same(getattr(before.samples, name), getattr(after.samples, name)[:kept]):
                return f"samples that were there before (their {name})"
        if any(getattr(before.samples, name) != getattr(after.samples, name) for name in _OF_SAMPLES):
            return "the dataset's description"
        for name in ("validation", "test", "global_test", "root"):
            old, new = getattr(before, name), getattr(after, name)
            if not all(_same(getattr(old, part), getattr(new, part)) for part in _OF_TABLE):
                return f"the table '{name}'"
        if after.clients != before.clients or after.held_out != before.held_out:
            return "the set of clients"
        for client in (
            (~torch.isin(torch.arange(before.clients), self.malicious)).nonzero().flatten().tolist()
        ):
            if not all(map(torch.equal, before.train.client(client), after.train.client(client))):
                return f"the data of client {client}, which is not malicious"
        return ""

    def crews(
        self, exchange: Exchange, schema: Schema, key: Key, round: int, unsent: bool = False
    ) -> list[Crew]:
        """The attackers that train by themselves before they answer a request; none where the request asks
        for no update, or sends no model (unless clients then begin with one of their own: `unsent`)."""
        attack = self.attack
        if (
            not isinstance(attack, OwnTraining)
            or attack.tasks is not None
            and exchange.task not in attack.tasks
        ):
            return []
        mine = torch.isin(exchange.to, self.at(round)).nonzero().flatten()
        given = unsent or exchange.pick.shape[1] > 0 and bool((exchange.pick[mine, 0] >= 0).all())
        if UPDATE not in schema or not len(mine) or not given:
            return []
        cohort, found = int(exchange.is_client.sum()), []
        for rows in self._at_once(mine):
            asked = without_unused_models(exchange.only(rows))
            owner = owner_of(attack.knows, asked.to)
            luck = key.fold(int(asked.to[0])) if attack.knows == "own" else key
            found.append(Crew(attack, asked, cohort, round, luck, owner, self.memories.of(owner)))
        return found

    def poison(
        self, task: str, schema: Schema, up: Uplink, key: Key, round: int = 0, sent: Exchange | None = None
    ) -> Uplink:
        """The replies as the malicious clients send them; only their rows and only the declared kinds of
        field can change."""
        return alone(self.poisoning(task, schema, up, key, round, sent))

    def poisoning(
        self,
        task: str,
        schema: Schema,
        up: Uplink,
        key: Key,
        round: int = 0,
        sent: Exchange | None = None,
        in_place: bool = False,
        trained: Uplink | None = None,
    ) -> Generator[Computation, Any, Uplink]:
        """The same as a generator that yields what is to be computed, so that several experiments are
        attacked at once (`core/together.py`). With `in_place`, the rows of malicious clients are written into
        the replies themselves, once all are computed: replies that lie next to each other stay there.
        `trained` is what the attackers' own training left, where they had one."""
        mine = torch.isin(up.ids, self.at(round)).nonzero().flatten()
        if self.attack is None or not len(mine):
            return up
        fields: dict[str, Tensor] = {}
        if self.attack.tasks is None or task in self.attack.tasks:
            acting = self._acting(task, schema, up, mine, key, round, sent, trained)
            request = NewRows(self.attack, up, [act.situation for act in acting])
            found: list[Said] = (yield request) if acting else []
            if sent is None or not sent.discard_state:  # requests of an evaluation are not recorded
                self._notes += [note for said in found for note in said.notes]
                for act, said in zip(acting, found, strict=True):
                    self.memories.add(act.owner, whole(said.remembered, up.columns if said.partly else None))
            for (name, shape), changes in self._changes(acting, found, up, task, schema).items():
                written = yield Written(up[name].reshape(shape), changes, in_place)
                fields[name] = written.reshape(up[name].shape)
        self._tell_lies(schema, up, mine, key, fields, in_place)
        return replace(up, fields={**up.fields, **fields}) if fields else up

    def _acting(
        self,
        task: str,
        schema: Schema,
        up: Uplink,
        mine: Tensor,
        key: Key,
        round: int,
        sent: Exchange | None,
        trained: Uplink | None,
    ) -> list[Acting]:
        """Who acts together on rows of updates, and on class means: class by class, among those who hold it.
        The models they were sent are not given with those, since a class mean cannot be compared with
        them."""
        attack = self.attack
        assert attack is not None
        acting, lasting = [], self.key.fold("lasting")
        for rows in self._at_once(mine) if attack.targets(schema) else ():
            owner, theirs = owner_of(attack.knows, up.ids[rows]), _of(trained, up.ids[rows])
            before = self.memories.of(owner).before
            situation = Situation(
                attack, task, schema, up, rows, key, sent, theirs, before, round, lasting, self.target
            )
            acting.append(Acting(situation, owner))
        unsent = sent and replace(sent, pick=sent.pick[:, :0])
        for name in attack.features_in(schema):
            for vote in votes(name, schema, up):
                luck, agreed = (each.fold(name).fold(vote.place or 0) for each in (key, lasting))
                holders = torch.isin(vote.up.ids, self.at(round)).nonzero().flatten()
                for rows in self._at_once(holders) if len(holders) else ():
                    owner = f"{owner_of(attack.knows, vote.up.ids[rows])}/{name}/{vote.place}"
                    before, target = self.memories.of(owner).before, self.target.of_means()
                    seen = (attack, task, vote.schema, vote.up, rows, luck, unsent)
                    situation = Situation(*seen, None, before, round, agreed, target)
                    acting.append(Acting(situation, owner, name, vote))
        return acting

    def _changes(
        self, acting: Sequence[Acting], found: Sequence[Said], up: Uplink, task: str, schema: Schema
    ) -> dict[tuple[str, tuple[int, ...]], list[tuple[Tensor, Tensor]]]:
        """By field, and by the shape in which its rows are counted: positions, and what stands there now."""
        changes: dict[tuple[str, tuple[int, ...]], list[tuple[Tensor, Tensor]]] = {}
        for (situation, _, means, vote), said in zip(acting, found, strict=True):
            if vote is None:
                for name, value in said.rows.items():
                    self._check_field(task, schema, name)
                    changes.setdefault((name, tuple(up[name].shape)), []).append((situation.rows, value))
            elif "update" in said.rows:
                width = situation.up["update"].shape[1]
                places = vote.positions(situation.rows, up[means][0].numel() // width)
                value = said.rows["update"].reshape(-1, width)
                changes.setdefault((means, (-1, width)), []).append((places, value))
        return changes

    def _tell_lies(
        self, schema: Schema, up: Uplink, mine: Tensor, key: Key, fields: dict[str, Tensor], in_place: bool
    ) -> None:
        """Change what the attackers send beside their update, as the settings `lies` and `claims` say."""
        attack = self.attack
        assert attack is not None
        for name, about in schema.items():
            if about.kind in attack.lies or about.kind in attack.claims:
                said = fields.setdefault(name, up[name] if in_place else up[name].clone())
                luck = key.fold("lie", name).fold(up.ids[mine])
                rows = to_device(mine, said.device)
                with sharing(up.columns if name == UPDATE else None):
                    told = lie(attack.lies.get(about.kind, 1.0), said[rows], about, luck)
                said[rows] = (
                    torch.full_like(told, attack.claims[about.kind]) if about.kind in attack.claims else told
                )

    def _at_once(self, mine: Tensor) -> tuple[Tensor, ...]:
        """Groups of attackers that act together; an attacker that knows only itself acts alone."""
        assert self.attack is not None
        return mine.split(1) if self.attack.knows == "own" else (mine,)

    def take_notes(self) -> list[str]:
        """The attack's notes since the last call, each once."""
        notes, self._notes = list(dict.fromkeys(self._notes)), []
        return notes

    def _check_field(self, task: str, schema: Schema, name: str) -> None:
        assert self.attack is not None
        if name not in schema:
            raise RunError(
                f"attack '{self.attack.name}' sends '{name}', which task '{task}' does not"
                f" have{suggest(name, schema)}"
            )
        if schema[name].kind not in self.attack.kinds:
            raise RunError(
                f"attack '{self.attack.name}' may not touch '{name}', which is of kind {schema[name].kind}"
            )


def _of(trained: Uplink | None, ids: Tensor) -> Uplink | None:
    """What the own training of these attackers left."""
    return None if trained is None else trained.only(torch.isin(trained.ids, ids))


def _mixed(honest: ClientRows, poisoned: ClientRows, malicious: Tensor) -> ClientRows:
    """The poisoned lists of some clients, the honest ones of the others."""
    if not torch.equal(honest.start, poisoned.start):
        raise RunError(
            "an attack whose clients are redrawn must leave every client as many samples as it had; leave"
            " attack.redraw out"
        )
    changed = torch.isin(owners(honest), malicious)
    return replace(
        honest,
        row=torch.where(changed, poisoned.row, honest.row),
        label=torch.where(changed, poisoned.label, honest.label),
    )


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a, b)


def _versions(federation: Federation) -> list[int]:
    """PyTorch counts the writes to a tensor; a change in place would reach every experiment that shares the
    samples."""
    tables = (
        federation.train,
        federation.validation,
        federation.test,
        federation.global_test,
        federation.root,
    )
    tensors = [getattr(table, part) for table in tables for part in _OF_TABLE]
    return [tensor._version for tensor in (federation.samples.x, federation.samples.y, *tensors)]
