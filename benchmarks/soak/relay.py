"""A relay between nodes and the proxy, as a network would be: its connections can be cut in the middle of a
message."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time


class Relay:
    """Carries bytes both ways, unread. `cut` resets all connections and refuses new ones for some seconds."""

    def __init__(self, port: int):
        self.target = port
        self._door = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._door.getsockname()[1]
        self.open = 0
        """Connections."""
        self._cuts = 0
        self._closed_until = 0.0
        self._limit: int | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._cuts += 1
        self._door.close()

    def cut(self, seconds: float) -> None:
        """Now, and nobody comes through for so many seconds."""
        self._closed_until = time.monotonic() + seconds
        self._cuts += 1

    def cut_after(self, size: int) -> None:
        """The next connection that has carried so many bytes is reset, once: a message arrives in part, or
        its receipt does not."""
        self._limit = size

    @property
    def armed(self) -> bool:
        return self._limit is not None

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._door.accept()
            except OSError:
                return
            if time.monotonic() < self._closed_until:
                _reset(line)
            else:
                threading.Thread(target=self._carry, args=(line,), daemon=True).start()

    def _carry(self, line: socket.socket) -> None:
        cuts = self._cuts
        try:
            onward = socket.create_connection(("127.0.0.1", self.target), timeout=60)
        except OSError:
            line.close()
            return
        self.open += 1
        try:
            self._pass_on(line, onward, cuts)
        except OSError:  # either side has gone
            pass
        finally:
            self.open -= 1
            for end in (line, onward):
                end.close()

    def _pass_on(self, line: socket.socket, onward: socket.socket, cuts: int) -> None:
        other, carried = {line: onward, onward: line}, 0
        while True:
            ready = select.select([line, onward], [], [], 0.1)[0]
            if cuts != self._cuts:
                break
            for source in ready:
                data = source.recv(1 << 16)
                if not data:
                    return
                carried += len(data)
                if self._limit is not None and carried > self._limit:
                    self._limit = None
                    _reset(line)
                    _reset(onward)
                    return
                other[source].sendall(data)
        _reset(line)
        _reset(onward)


def _reset(line: socket.socket) -> None:
    """Not a polite end: the other side sees that the connection broke."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()
