"""Decides which node is which client, and which nodes may take part. A trial on one machine believes what a
node says; a real federation goes by keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from typing import Protocol

from flwr.app import RecordDict
from flwr.common import log

from holdfast.deploy.enrolment import Enrolment
from holdfast.deploy.ledger import Entry, Ledger
from holdfast.deploy.messaging import Messaging, Request, read_client
from holdfast.deploy.replies import ReplyLimits
from holdfast.deploy.wire import Header

_HELLO = ReplyLimits(objects=8, size=1 << 16)  # of a reply that holds one number


class Admission(Protocol):
    hint: str
    """What to do when no client joins."""

    def connected(self) -> Mapping[int, int]:
        """Return the clients that are connected now, each with its node."""
        ...

    def admitted_count(self, clients: int) -> int:
        """Return how many of the first `clients` clients may take part."""
        ...

    def admits(self, client: int) -> bool:
        """Return whether a reply of this client may be used."""
        ...

    def record_exchange(self, header: Header, refused: Mapping[int, str], missing: Mapping[int, str]) -> None:
        """Record the outcome of an exchange."""
        ...

    def record_wait(self, header: Header, answered: int, missing: Mapping[int, str], seconds: float) -> None:
        """Record that the run waits for a quorum, for so many seconds at most."""
        ...

    def record_pause(self, header: Header, client: int, until: int, pauses: int) -> None:
        """Record that this client is not asked before round `until`; `pauses` counts its pauses in a row."""
        ...

    def key_of(self, client: int) -> str:
        """Return the public key of a client; an empty string where there are no keys."""
        ...

    def ledger_entries(self) -> Sequence[Entry]:
        """Return what the ledger holds so far."""
        ...


@dataclass
class OpenAdmission:
    """Believes the client id that a node states when it is first seen. Of several nodes that claim to be one
    client the first counts, as long as it is connected."""

    messaging: Messaging
    clients: int
    deadline: float
    claims: dict[int, int | None] = field(default_factory=dict)
    """Every node that was ever asked, and the client it claims to be."""
    hint: str = "start SuperNodes with --node-config 'client-id=0 state-dir=...'"

    def connected(self) -> Mapping[int, int]:
        online = set(self.messaging.grid.get_node_ids())
        new_nodes = sorted(online - set(self.claims))
        requests = {node: Request(RecordDict(), self._read, _HELLO, self.deadline) for node in new_nodes}
        replies = self.messaging.ask("query", requests)
        self.claims |= {node: None for node in new_nodes}
        self.claims |= replies.answers
        for reason in [*replies.malformed.values(), *replies.missing.values()]:
            log(WARNING, "a node was not admitted: %s", reason)
        here: dict[int, int] = {}
        for node, client in self.claims.items():
            if node in online and client is not None:
                here.setdefault(client, node)
        return here

    def _read(self, content: RecordDict) -> int:
        return read_client(content, self.clients)

    def admitted_count(self, clients: int) -> int:
        return clients

    def admits(self, client: int) -> bool:
        return True

    def record_exchange(self, header: Header, refused: Mapping[int, str], missing: Mapping[int, str]) -> None:
        pass

    def record_wait(self, header: Header, answered: int, missing: Mapping[int, str], seconds: float) -> None:
        pass

    def record_pause(self, header: Header, client: int, until: int, pauses: int) -> None:
        pass

    def key_of(self, client: int) -> str:
        return ""

    def ledger_entries(self) -> Sequence[Entry]:
        return ()


@dataclass
class KeyedAdmission:
    """Knows a client by its key: the SuperLink has checked that the node holds the private half. Nodes whose
    key is not enrolled and banned clients are sent nothing. A fault in a reply is a strike, and `strikes`
    strikes are a ban."""

    messaging: Messaging
    clients: int
    ledger: Ledger
    strikes: int = 3
    """0: strikes never lead to a ban."""
    hint: str = "look at `holdfast federation clients` and at the nodes' logs"

    def __post_init__(self) -> None:
        self.enrolment, self._seen = Enrolment.of(self.ledger.entries), len(self.ledger.entries)
        self.rejected = {str(entry.what.get("node")) for entry in self.ledger.of("stranger")}

    def connected(self) -> Mapping[int, int]:
        self._read_ledger()
        here: dict[int, int] = {}
        for node in sorted(self.messaging.grid.get_nodes(), key=lambda info: info.node_id):
            client = self.enrolment.client_of(node.public_key)
            if client is None:
                owner = self.enrolment.replaced(node.public_key)
                self._reject(
                    int(node.node_id),
                    "its key is not enrolled" if owner is None else f"client {owner} has another key now",
                )
            elif client < self.clients and client in self.enrolment.admitted:
                here.setdefault(client, int(node.node_id))
        return here

    def admitted_count(self, clients: int) -> int:
        return len([client for client in self.enrolment.admitted if client < clients])

    def admits(self, client: int) -> bool:
        self._read_ledger()
        return client in self.enrolment.admitted

    def record_exchange(self, header: Header, refused: Mapping[int, str], missing: Mapping[int, str]) -> None:
        """Add strikes, missing clients and bans to the ledger. A round that is repeated after a stop finds
        the same faults again: they count once."""
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
            reasons = {str(client): reason for client, reason in sorted(missing.items())}
            self.ledger.append(
                "missing", None, header.round, clients=reasons, task=header.task, step=header.step
            )
        self._read_ledger()
        for member in list(self.enrolment.members.values()):
            if self.strikes and member.banned is None and len(member.strikes) >= self.strikes:
                reason = f"{len(member.strikes)} strikes, the last: {member.strikes[-1]}"
                self.ledger.append("ban", member.client, header.round, reason=reason, by="strikes")
                log(WARNING, "client %d is banned: %s", member.client, reason)
        self._read_ledger()

    def record_wait(self, header: Header, answered: int, missing: Mapping[int, str], seconds: float) -> None:
        reasons = {str(client): reason for client, reason in sorted(missing.items())}
        self.ledger.append(
            "wait", None, header.round, clients=reasons, task=header.task, answered=answered, seconds=seconds
        )

    def record_pause(self, header: Header, client: int, until: int, pauses: int) -> None:
        self.ledger.append("pause", client, header.round, until=until, pauses=pauses, run=header.run)
        log(
            WARNING,
            "client %d missed several deadlines in a row and is not asked before round %d",
            client,
            until,
        )

    def key_of(self, client: int) -> str:
        member = self.enrolment.members.get(client)
        return "" if member is None else member.key

    def ledger_entries(self) -> Sequence[Entry]:
        return self.ledger.entries

    def _read_ledger(self) -> None:
        self.ledger.refresh()
        for entry in self.ledger.entries[self._seen :]:
            self.enrolment.apply(entry)
        self._seen = len(self.ledger.entries)

    def _reject(self, node: int, reason: str) -> None:
        if str(node) not in self.rejected:
            self.rejected.add(str(node))
            self.ledger.append("stranger", node=str(node), reason=reason)
            log(WARNING, "rejected an unauthenticated node (%d): %s", node, reason)
