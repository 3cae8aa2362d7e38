"""How long and how much the proxy bears from a connection, and which connections it closes when there are too
many.

Nodes come first: a connection on which nobody has proved to be a node is a stranger's. There is connections
for some of them, in all and from one address; who comes when there is none takes the place of the oldest, so
that silent ones cannot keep a node out. Several nodes may have one address, and nodes that have proved who
they are do not count. One key has only so many connections, so that no node takes the others'."""

from __future__ import annotations

import ipaddress
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_OFTEN = 60.0  # seconds between two lines about strangers, so that nobody can fill the log


@dataclass(frozen=True)
class Limits:
    handshake: float = 10.0
    """Seconds for the TLS handshake: three messages."""
    header: float = 10.0
    """Seconds for the headers of a request, from its first byte on; of the first request, from the handshake
    on."""
    idle: float = 75.0
    """Seconds that a node's connection may rest: well beyond the 5 after which a sender drops it itself, so
    that it never sends into a closing one."""
    grace: float = 20.0
    """Seconds without a byte of a body or of a reply that is being read, and seconds after which its rate
    counts: a radio link that is lost for a moment must not end it."""
    rate: int = 16_000
    """Bytes a second of a body, and of a reply that is read: a piece of 5 MB in five minutes."""
    body: float = 240.0
    """Seconds for a whole body: its headers are signed, and the signature is good for five minutes."""
    strangers: int = 512
    """Connections of strangers: each takes about 300 kB, so these take about 150 MB."""
    address: int = 192
    """Of them, from one address: forty nodes behind one, or of a trial on one machine, may each begin a few
    at the same moment."""
    node: int = 16
    """Connections of one node: a SuperNode has up to five."""


class MinimumRate:
    """Whether something goes on fast enough: after the grace, so many bytes for every second."""

    def __init__(self, limits: Limits, whole: float):
        self.limits, self.began, self.whole, self.bytes = limits, time.monotonic(), whole, 0

    def left(self) -> float:
        """Seconds within which the next bytes must come."""
        allowed = min(self.limits.grace + self.bytes / self.limits.rate, self.whole)
        return max(0.0, min(self.limits.grace, self.began + allowed - time.monotonic()))


class Connection:
    """What is known of one; `close` ends it at once."""

    def __init__(self, host: str, close: Callable[[], None]):
        self.address, self.close = _network(host), close
        self.node: str | None = None
        self.busy = False
        self.used = time.monotonic()


class Connections:
    """All connections that there are."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.strangers: dict[Connection, None] = {}  # the oldest first
        self.nodes: dict[str, dict[Connection, None]] = {}

    def add(self, new: Connection) -> bool:
        """True where another one had to go."""
        same = [one for one in self.strangers if one.address == new.address]
        gone = None
        if len(same) >= self.limits.address:
            gone = same[0]
        elif len(self.strangers) >= self.limits.strangers:  # of the address that has most of them
            most = Counter(one.address for one in self.strangers).most_common(1)[0][0]
            gone = next(one for one in self.strangers if one.address == most)
        if gone is not None:
            self._end(gone)
        self.strangers[new] = None
        return gone is not None

    def authenticate(self, connection: Connection, node: str) -> None:
        """Somebody has proved on this connection to be this node."""
        if connection.node == node:
            return
        self.remove(connection)
        own = self.nodes.setdefault(node, {})
        if len(own) >= self.limits.node:
            self._end(min(own, key=lambda one: (one.busy, one.used)))
        connection.node = node
        self.nodes.setdefault(node, {})[connection] = None

    def remove(self, connection: Connection) -> None:
        self.strangers.pop(connection, None)
        own = self.nodes.get(connection.node or "", {})
        own.pop(connection, None)
        if not own:
            self.nodes.pop(connection.node or "", None)

    def close_oldest(self) -> None:
        """The system gives no more connections: the oldest stranger's goes."""
        for oldest in list(self.strangers)[:1]:
            self._end(oldest)

    def _end(self, connection: Connection) -> None:
        self.remove(connection)
        connection.close()


class RefusalCounter:
    """What strangers do is counted, and said once in a while."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.said = time.monotonic() - _OFTEN

    def add(self, what: str, more: str = "") -> None:
        self.counts[what] += 1
        if time.monotonic() - self.said >= _OFTEN:
            print("refused: " + ", ".join(_counted(self.counts.items())), more, file=sys.stderr, flush=True)
            self.counts, self.said = Counter(), time.monotonic()


def _counted(counts: Iterable[tuple[str, int]]) -> list[str]:
    return [f"{what} {count}" for what, count in sorted(counts)]


def _network(host: str) -> str:
    """An address, and of IPv6 the network of one customer, who has more addresses than anybody can count."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return (
        str(ipaddress.ip_network((address, 64), strict=False))
        if address.version == 6 and address.ipv4_mapped is None
        else str(address)
    )
