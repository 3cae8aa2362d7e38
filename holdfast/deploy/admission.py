"""Which node is which client, and who is let in. A trial on one machine believes what a node says; a real
federation goes by keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from typing import Protocol

from flwr.app import RecordDict
from flwr.common import log

from holdfast.deploy.enrolment import Enrolment
from holdfast.deploy.ledger import Entry, Ledger
from holdfast.deploy.messaging import Letter, Post, read_client
from holdfast.deploy.replies import ReplyLimits
from holdfast.deploy.wire import Header

_HELLO = ReplyLimits(objects=8, size=1 << 16)  # a reply that says one number


class Door(Protocol):
    hint: str
    """What to do when nobody comes."""

    def meet(self) -> Mapping[int, int]:
        """The clients that are connected now, each with its node."""
        ...

    def welcome(self, clients: int) -> int:
        """How many of all clients may come."""
        ...

    def admits(self, client: int) -> bool:
        """Whether what this client sent may be used."""
        ...

    def note(self, header: Header, refused: Mapping[int, str], missing: Mapping[int, str]) -> None:
        """What became of an exchange."""
        ...

    def waits(self, header: Header, answered: int, missing: Mapping[int, str], seconds: float) -> None:
        """The run waits for a quorum, for so many seconds at most."""
        ...

    def pause(self, header: Header, client: int, until: int, pauses: int) -> None:
        """This client is not asked before that round, and how often in a row it was paused."""
        ...

    def key_of(self, client: int) -> str:
        """The public key of a client; nothing where there are no keys."""
        ...

    def told(self) -> Sequence[Entry]:
        """What was written into the ledger so far."""
        ...


@dataclass
class OpenDoor:
    """Everybody is who he says he is, asked for when a node is first seen. Of several nodes that claim to be
    one client the first counts, as long as it is connected."""

    post: Post
    clients: int
    deadline: float
    claims: dict[int, int | None] = field(
        default_factory=dict
    )  # every node that was ever asked, and which client it says it is
    hint: str = "start SuperNodes with --node-config 'client-id=0 state-dir=...'"

    def meet(self) -> Mapping[int, int]:
        online = set(self.post.grid.get_node_ids())
        strangers = sorted(online - set(self.claims))
        letters = {node: Letter(RecordDict(), self._read, _HELLO, self.deadline) for node in strangers}
        mail = self.post.ask("query", letters)
        self.claims |= {node: None for node in strangers}
        self.claims |= mail.answers
        for reason in [*mail.malformed.values(), *mail.missing.values()]:
            log(WARNING, "a node is not enrolled: %s", reason)
        here: dict[int, int] = {}
        for node, client in self.claims.items():
            if node in online and client is not None:
                here.setdefault(client, node)
        return here

    def _read(self, content: RecordDict) -> int:
        return read_client(content, self.clients)

    def welcome(self, clients: int) -> int:
        return clients

    def admits(self, client: int) -> bool:
        return True

    def note(self, header: Header, refused: Mapping[int, str], missing: Mapping[int, str]) -> None:
        pass

    def waits(self, header: Header, answered: int, missing: Mapping[int, str], seconds: float) -> None:
        pass

    def pause(self, header: Header, client: int, until: int, pauses: int) -> None:
        pass

    def key_of(self, client: int) -> str:
        return ""

    def told(self) -> Sequence[Entry]:
        return ()


@dataclass
class KeyedDoor:
    """A client is whoever has its key: the SuperLink has checked that the node holds the private half.
    Strangers and banned clients are sent nothing. What is wrong with a reply is a strike, and so many strikes
    are a ban."""

    post: Post
    clients: int
    ledger: Ledger
    strikes: int = 3
    """0: nobody is banned for them."""
    hint: str = "look at `holdfast federation clients` and at the nodes' logs"

    def __post_init__(self) -> None:
        self.who, self._seen = Enrolment.of(self.ledger.entries), len(self.ledger.entries)
        self.strangers = {str(entry.what.get("node")) for entry in self.ledger.of("stranger")}

    def meet(self) -> Mapping[int, int]:
        self._look()
        here: dict[int, int] = {}
        for node in sorted(self.post.grid.get_nodes(), key=lambda info: info.node_id):
            client = self.who.client_of(node.public_key)
            if client is None:
                owner = self.who.replaced(node.public_key)
                self._turn_away(
                    int(node.node_id),
                    "its key is not enrolled" if owner is None else f"client {owner} has another key now",
                )
            elif client < self.clients and client in self.who.welcome:
                here.setdefault(client, int(node.node_id))
        return here

    def welcome(self, clients: int) -> int:
        return len([client for client in self.who.welcome if client < clients])

    def admits(self, client: int) -> bool:
        self._look()
        return client in self.who.welcome

    def note(self, header: Header, refused: Mapping[int, str], missing: Mapping[int, str]) -> None:
        """A round that is played again after a stop finds the same faults again: they count once."""
        where = {"run": header.run, "task": header.task, "step": header.step}
        seen = {
            e.client
            for e in self.ledger.of("strike")
            if e.round == header.round and where.items() <= e.what.items()
        }
        for client, reason in sorted(refused.items()):
            if client not in seen:
                self.ledger.append("strike", client, header.round, reason=reason, **where)
        if missing:
            said = {str(client): reason for client, reason in sorted(missing.items())}
            self.ledger.append(
                "missing", None, header.round, clients=said, task=header.task, step=header.step
            )
        self._look()
        for member in list(self.who.members.values()):
            if self.strikes and member.banned is None and len(member.strikes) >= self.strikes:
                reason = f"{len(member.strikes)} strikes, the last: {member.strikes[-1]}"
                self.ledger.append("ban", member.client, header.round, reason=reason, by="strikes")
                log(WARNING, "client %d is banned: %s", member.client, reason)
        self._look()

    def waits(self, header: Header, answered: int, missing: Mapping[int, str], seconds: float) -> None:
        said = {str(client): reason for client, reason in sorted(missing.items())}
        self.ledger.append(
            "wait", None, header.round, clients=said, task=header.task, answered=answered, seconds=seconds
        )

    def pause(self, header: Header, client: int, until: int, pauses: int) -> None:
        self.ledger.append("pause", client, header.round, until=until, pauses=pauses, run=header.run)
        log(
            WARNING,
            "client %d has not answered again and again and is not asked before round %d",
            client,
            until,
        )

    def key_of(self, client: int) -> str:
        member = self.who.members.get(client)
        return "" if member is None else member.key

    def told(self) -> Sequence[Entry]:
        return self.ledger.entries

    def _look(self) -> None:
        self.ledger.refresh()
        for entry in self.ledger.entries[self._seen :]:
            self.who.take_in(entry)
        self._seen = len(self.ledger.entries)

    def _turn_away(self, node: int, reason: str) -> None:
        if str(node) not in self.strangers:
            self.strangers.add(str(node))
            self.ledger.append("stranger", node=str(node), reason=reason)
            log(WARNING, "node %d gets nothing: %s", node, reason)
