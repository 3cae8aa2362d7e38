"""What the proxy has seen of every node: when it sent its last request, and how many bytes it has sent and
was sent; and how many requests were refused, by kind. The proxy writes it to server/traffic.json every few
seconds, for `watch` and for the metrics; nothing is decided by it."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.core.errors import HoldfastError, RunError
from holdfast.core.files import as_json, remove_left_over, replace_file
from holdfast.core.reading import is_number, is_whole, read_json

_EVERY = 5.0  # seconds between two writes
_SILENT = 60.0  # seconds without a request after which the next one is news
_MOST = 10**18  # bytes and requests that a file may state


@dataclass
class NodeTraffic:
    """One key. Bytes are those of bodies of requests (up) and of their answers (down)."""

    seen: float = 0.0
    """When it sent its last request, in seconds since the epoch."""
    up: int = 0
    down: int = 0


@dataclass
class Traffic:
    """The counts since the federation was made: a proxy that is started again continues them."""

    nodes: dict[str, NodeTraffic] = field(default_factory=dict)
    """By the fingerprint of the key."""
    refused: Counter[str] = field(default_factory=Counter)
    """Requests of nodes with a key that were refused, by kind (fleet_rules.py)."""
    unauthenticated: int = 0
    """Requests without a registered key."""

    def of(self, fingerprint: str) -> NodeTraffic:
        return self.nodes.setdefault(fingerprint, NodeTraffic())


def read_traffic(file: Path) -> Traffic:
    """Read the file; what is missing or cannot be read counts as nothing."""
    out = Traffic()
    try:
        content = read_json(file) or {}
    except RunError:
        return out
    nodes, refused = content.get("nodes"), content.get("refused")
    for name, about in nodes.items() if isinstance(nodes, dict) else ():
        if isinstance(about, dict) and is_number(about.get("seen")):
            sizes = [about.get(way) for way in ("up", "down")]
            if all(is_whole(size, most=_MOST) for size in sizes):
                out.nodes[name] = NodeTraffic(float(about["seen"]), about["up"], about["down"])
    for kind, count in refused.items() if isinstance(refused, dict) else ():
        if is_whole(count, most=_MOST):
            out.refused[kind] = count
    if is_whole(content.get("unauthenticated"), most=_MOST):
        out.unauthenticated = content["unauthenticated"]
    return out


class TrafficCounter:
    """Counts in the proxy, and writes the file at most every few seconds."""

    def __init__(self, file: Path | None = None):
        self.file, self.saved = file, time.monotonic()
        self.traffic = Traffic() if file is None else read_traffic(file)
        if file is not None:
            remove_left_over(file.parent)

    def request(self, fingerprint: str) -> None:
        """Count a request of a node. The first one, also after a long silence, is written down at once."""
        node, now = self.traffic.of(fingerprint), time.time()
        silent, node.seen = now - node.seen, now
        if silent > _SILENT:
            self.save(now=True)

    def up(self, fingerprint: str, size: int) -> None:
        self.traffic.of(fingerprint).up += size

    def down(self, fingerprint: str, size: int) -> None:
        self.traffic.of(fingerprint).down += size

    def refused(self, kind: str) -> None:
        self.traffic.refused[kind] += 1

    def unauthenticated(self) -> None:
        self.traffic.unauthenticated += 1

    def save(self, now: bool = False) -> None:
        if self.file is None or not (now or time.monotonic() - self.saved >= _EVERY):
            return
        self.saved, traffic = time.monotonic(), self.traffic
        content = {
            "nodes": {
                name: {"seen": one.seen, "up": one.up, "down": one.down}
                for name, one in traffic.nodes.items()
            },
            "refused": dict(traffic.refused),
            "unauthenticated": traffic.unauthenticated,
        }
        try:
            replace_file(self.file, as_json(content))
        except HoldfastError as error:  # a full disk must not stop the proxy
            print(str(error), file=sys.stderr, flush=True)
