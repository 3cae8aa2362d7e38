"""Notices between the ServerApp and the proxy, so that neither must ask the SuperLink again and again: the
proxy tells which message has been answered, the ServerApp that there are new messages for nodes.

A notice is a datagram on a Unix socket that only its owner can open. It is a hint: what it says is looked up
in the SuperLink, one that is lost costs seconds, and one from somebody else costs a question."""

from __future__ import annotations

import select
import socket
from pathlib import Path

from holdfast.deploy.sockets import notices_of

ANSWERED, POSTED = "answered", "posted"
_LONGEST = 200  # bytes of a notice


class Notices:
    """One receiver of notices, and where to send one's own. `mine` is ANSWERED for the ServerApp, POSTED for
    the proxy."""

    def __init__(self, server: Path, mine: str):
        self.path = notices_of(server, mine)
        self.other = notices_of(server, POSTED if mine == ANSWERED else ANSWERED)
        self.path.unlink(missing_ok=True)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.path))
        self.socket.setblocking(False)

    def send(self, text: str) -> None:
        try:
            self.socket.sendto(text.encode(), str(self.other))
        except OSError:  # nobody listens, or has not listened for long
            pass

    def wait(self, seconds: float) -> list[str]:
        """Return the notices that have come; wait for the first of them for at most so many seconds."""
        out: list[str] = []
        select.select([self.socket], [], [], max(0.0, seconds))
        while True:
            try:
                out.append(self.socket.recv(_LONGEST).decode(errors="replace"))
            except BlockingIOError:
                return out

    def close(self) -> None:
        self.socket.close()
        self.path.unlink(missing_ok=True)
