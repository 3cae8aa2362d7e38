"""The limits of the proxy's connections, and which ones it closes when there are too many.

Nodes come first. A connection is unauthenticated until a request on it is signed by a registered node. There
may be some of these, in all and from one address; a new one beyond that replaces the oldest, so silent
connections cannot keep a node out. Several nodes may share an address, and authenticated connections do not
count. One key has only so many connections, so no node takes the others'."""

from __future__ import annotations

import ipaddress
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_OFTEN = 60.0  # seconds between two log lines about refusals, which bounds the log


@dataclass(frozen=True)
class Limits:
    """Time limits and numbers of connections."""

    handshake: float = 10.0
    """Seconds for the TLS handshake: three messages."""
    header: float = 10.0
    """Seconds for the headers of a request, from its first byte on; of the first request, from the handshake
    on."""
    idle: float = 75.0
    """Seconds that a node's connection may be idle: well beyond the 5 after which a sender drops it itself,
    so it never sends into a closing one."""
    grace: float = 20.0
    """Seconds without a byte of a body or of a reply that is being read, and seconds after which its rate
    counts: a radio link that is lost for a moment must not end it."""
    rate: int = 16_000
    """Bytes per second of a body, and of a reply that is read: a piece of 5 MB in five minutes."""
    body: float = 240.0
    """Seconds for a whole body: its headers are signed, and the signature is valid for five minutes."""
    unauthenticated: int = 512
    """Unauthenticated connections: each takes about 300 kB, so these take about 150 MB."""
    per_address: int = 192
    """Of them, from one address: forty nodes behind one address, or in a trial on one machine, may each begin
    a few at the same moment."""
    per_node: int = 16
    """Connections of one node: a SuperNode has up to five."""


class MinimumRate:
    """Checks the rate of a transfer: after the grace period, so many bytes for every second."""

    def __init__(self, limits: Limits, whole: float):
        self.limits, self.began, self.whole, self.bytes = limits, time.monotonic(), whole, 0

    def left(self) -> float:
        """Return the seconds within which the next bytes must come."""
        allowed = min(self.limits.grace + self.bytes / self.limits.rate, self.whole)
        return max(0.0, min(self.limits.grace, self.began + allowed - time.monotonic()))


class Connection:
    """The state of one connection; `close` ends it at once."""

    def __init__(self, host: str, close: Callable[[], None]):
        self.address, self.close = _network(host), close
        self.node: str | None = None
        self.busy = False
        self.used = time.monotonic()


class Connections:
    """All open connections."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.unauthenticated: dict[Connection, None] = {}  # oldest first
        self.nodes: dict[str, dict[Connection, None]] = {}

    def add(self, new: Connection) -> bool:
        """Add a connection; return True if another one was closed for it."""
        same = [one for one in self.unauthenticated if one.address == new.address]
        closed = None
        if len(same) >= self.limits.per_address:
            closed = same[0]
        elif len(self.unauthenticated) >= self.limits.unauthenticated:  # of the address that has most of them
            most = Counter(one.address for one in self.unauthenticated).most_common(1)[0][0]
            closed = next(one for one in self.unauthenticated if one.address == most)
        if closed is not None:
            self._end(closed)
        self.unauthenticated[new] = None
        return closed is not None

    def authenticate(self, connection: Connection, node: str) -> None:
        """Record that this connection belongs to this node."""
        if connection.node == node:
            return
        self.remove(connection)
        own = self.nodes.setdefault(node, {})
        if len(own) >= self.limits.per_node:
            self._end(min(own, key=lambda one: (one.busy, one.used)))
        connection.node = node
        self.nodes.setdefault(node, {})[connection] = None

    def remove(self, connection: Connection) -> None:
        self.unauthenticated.pop(connection, None)
        own = self.nodes.get(connection.node or "", {})
        own.pop(connection, None)
        if not own:
            self.nodes.pop(connection.node or "", None)

    def close_oldest(self) -> None:
        """Close the oldest unauthenticated connection, when the system accepts no more."""
        for oldest in list(self.unauthenticated)[:1]:
            self._end(oldest)

    def _end(self, connection: Connection) -> None:
        self.remove(connection)
        connection.close()


class RefusalCounter:
    """Counts refused connections and requests, and logs the counts at most once a minute."""

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
    """Return the address, or for IPv6 the network of one customer, who has many addresses."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return (
        str(ipaddress.ip_network((address, 64), strict=False))
        if address.version == 6 and address.ipv4_mapped is None
        else str(address)
    )
