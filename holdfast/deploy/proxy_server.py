"""The server of the proxy: TLS and HTTP/1.1 for an ASGI app, with a time limit for everything that the other
side must do.

`scope["extensions"]["node"]` is a function: the app calls it with a node's fingerprint as soon as it knows
the sender of a request."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import struct
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import h11

from holdfast.core.errors import in_print
from holdfast.deploy.proxy_limits import Connection, Connections, Limits, MinimumRate, RefusalCounter

App = Callable[
    [dict[str, Any], Callable[[], Awaitable[dict[str, Any]]], Callable[[dict[str, Any]], Awaitable[None]]],
    Awaitable[None],
]
_HEADERS = 16_384  # bytes of all headers of a request
_CHUNK = 131_072  # bytes that are read at a time; a connection that is not read holds twice as many
_FAREWELL = 1.0  # seconds to close TLS, and to read the rest of a request that was answered before its end
_UNREAD = 1_000_000  # bytes of that
_LAST = 3.0  # seconds for requests in progress when the proxy is stopped
_BACKLOG = 1024  # connections that wait to be accepted
# bytes that the system keeps of a reply for one who does not read it; by itself it keeps eight times as many
_UNSENT = 524_288
_PAUSE = 0.1  # seconds, when the system gives no more connections


class ReplyTooSlow(Exception):
    """The other side does not read the reply, or reads it too slowly."""


class Server:
    """Accepts connections and passes requests to the app."""

    def __init__(
        self,
        app: App,
        context: ssl.SSLContext,
        limits: Limits,
        counter: RefusalCounter,
        stopping: Callable[[], None] = lambda: None,
    ):
        """`stopping` is called when no more connections are accepted and requests in progress should end."""
        self.stopping = stopping
        self.app, self.context, self.limits, self.counter = app, context, limits, counter
        self.connections = Connections(limits)
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self, host: str, port: int) -> None:
        """Serve until SIGTERM or SIGINT."""
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.set_exception_handler(
            lambda _, about: self.counter.add(
                "broken connections", in_print(str(about.get("exception")))[:200]
            )
        )
        listeners = _listen(host, port)
        accepting = [loop.create_task(self._accept(listener)) for listener in listeners]
        waiting = loop.create_task(stop.wait())
        done, _ = await asyncio.wait([waiting, *accepting], return_when=asyncio.FIRST_COMPLETED)
        for task in (waiting, *accepting):
            task.cancel()
        for listener in listeners:
            listener.close()
        self.stopping()
        await self._finish()
        for task in done - {waiting}:
            task.result()  # accepting ends only by an error

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, peer = await loop.sock_accept(listener)
            except OSError:  # too many open files, or one that was gone before it was accepted
                self.connections.close_oldest()
                await asyncio.sleep(_PAUSE)
                continue
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNSENT)
            handler = _ConnectionHandler(self, accepted, str(peer[0]))
            if self.connections.add(handler.connection):
                self.counter.add("connections closed for newer ones")
            handler.task = loop.create_task(handler.run())
            self.tasks.add(handler.task)
            handler.task.add_done_callback(self.tasks.discard)
            await asyncio.sleep(0)  # so that it begins, however many others wait to be accepted

    async def _finish(self) -> None:
        for one in [
            *self.connections.unauthenticated,
            *(one for own in list(self.connections.nodes.values()) for one in own),
        ]:
            if not one.busy:
                one.close()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=_LAST)
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class _ConnectionHandler:
    """One connection, from its acceptance to its end."""

    def __init__(self, server: Server, accepted: socket.socket, host: str):
        self.server, self.limits, self.accepted = server, server.limits, accepted
        self.connection = Connection(host, self._close)
        self.task: asyncio.Task[None] | None = None
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEADERS)

    def _close(self) -> None:
        if self.task is not None:
            self.task.cancel()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self.reader = asyncio.StreamReader(_CHUNK, loop)
        protocol = asyncio.StreamReaderProtocol(self.reader, loop=loop)
        transport: asyncio.Transport | None = None
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                self.accepted,
                ssl=self.server.context,
                ssl_handshake_timeout=self.limits.handshake,
                ssl_shutdown_timeout=_FAREWELL,
            )
            self.writer = asyncio.StreamWriter(transport, protocol, self.reader, loop)
            await self._serve_requests()
            transport.close()
        except (asyncio.CancelledError, ReplyTooSlow):
            _abort(transport, self.accepted)
        except (TimeoutError, OSError, h11.ProtocolError) as error:  # ssl.SSLError is an OSError
            if self.connection.node is None and not isinstance(
                error, ConnectionResetError
            ):  # else the other side has left
                self.server.counter.add("connections without a request")
            _abort(transport, self.accepted)
        except Exception:  # a fault of ours: it ends this connection and is logged
            self.server.counter.add("internal errors", traceback.format_exc())
            _abort(transport, self.accepted)
        finally:
            self.server.connections.remove(self.connection)

    async def _serve_requests(self) -> None:
        idle = False  # whether the connection was idle before this request
        while (request := await self._next_request(idle)) is not None:
            self.connection.busy = True
            exchange = _HttpExchange(self, request)
            await self.server.app(exchange.scope(), exchange.receive, exchange.send)
            if (
                self.http.their_state is not h11.DONE
                or self.http.our_state is not h11.DONE
                or self.connection.node is None
            ):
                await self._drain()
                return
            self.http.start_next_cycle()
            self.connection.busy, self.connection.used = False, asyncio.get_running_loop().time()
            idle = True

    async def _next_request(self, idle: bool) -> h11.Request | None:
        """Return the next request; None when the other side has closed the connection."""
        end = None if idle and not self.http.trailing_data[0] else self._clock() + self.limits.header
        while True:
            event = self.http.next_event()
            if isinstance(event, h11.Request):
                return event
            if event is not h11.NEED_DATA:
                return None
            async with asyncio.timeout(self.limits.idle if end is None else max(0.0, end - self._clock())):
                data = await self.reader.read(_CHUNK)
            end = end if end is not None else self._clock() + self.limits.header
            self.http.receive_data(data)

    async def _drain(self) -> None:
        """Read a little of the rest: a sender that is still sending would lose the answer if the connection
        were reset."""
        unread = 0
        try:
            async with asyncio.timeout(_FAREWELL):
                await self.writer.drain()
                while self.http.their_state is h11.SEND_BODY and unread < _UNREAD:
                    if self.http.next_event() is h11.NEED_DATA:
                        self.http.receive_data(data := await self.reader.read(_CHUNK))
                        unread += len(data)
        except (TimeoutError, h11.RemoteProtocolError):
            pass

    @staticmethod
    def _clock() -> float:
        return asyncio.get_running_loop().time()


class _HttpExchange:
    """One request and its reply."""

    def __init__(self, handler: _ConnectionHandler, request: h11.Request):
        self.handler, self.http, self.request = handler, handler.http, request
        self.body: MinimumRate | None = None
        self.reply: MinimumRate | None = None
        self.head = b""  # goes out with the first of the body

    def scope(self) -> dict[str, Any]:
        target, _, query = self.request.target.partition(b"?")
        connections, connection = self.handler.server.connections, self.handler.connection
        return {
            "type": "http",
            "method": self.request.method.decode("ascii"),
            "path": target.decode("ascii", "replace"),
            "raw_path": target,
            "query_string": query,
            "headers": [(name, value) for name, value in self.request.headers],
            "extensions": {"node": lambda node: connections.authenticate(connection, node)},
        }

    async def receive(self) -> dict[str, Any]:
        """Return the next part of the body; raise a TimeoutError if it comes too slowly."""
        if self.body is None:
            self.body = MinimumRate(self.handler.limits, self.handler.limits.body)
        try:
            while True:
                event = self.http.next_event()
                if isinstance(event, h11.Data):
                    return {"type": "http.request", "body": bytes(event.data), "more_body": True}
                if event is not h11.NEED_DATA:
                    return {"type": "http.request", "body": b"", "more_body": False}
                if self.http.they_are_waiting_for_100_continue:
                    await self._write(
                        self.http.send(h11.InformationalResponse(status_code=100, headers=[])) or b""
                    )
                async with asyncio.timeout(self.body.left()):
                    data = await self.handler.reader.read(_CHUNK)
                self.body.bytes += len(data)
                self.http.receive_data(data)
        except (h11.RemoteProtocolError, ConnectionError):
            return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = list(message["headers"])
            if self.http.their_state is not h11.DONE or self.handler.connection.node is None:
                headers.append((b"connection", b"close"))
            self.head = self.http.send(h11.Response(status_code=message["status"], headers=headers)) or b""
            return
        out = self.http.send(h11.Data(data=message["body"])) or b"" if message.get("body") else b""
        if not message.get("more_body", False):
            out += self.http.send(h11.EndOfMessage()) or b""
        head, self.head = self.head, b""
        await self._write(head + out)

    async def _write(self, out: bytes) -> None:
        """Send bytes; wait until the other side has read enough of them."""
        if self.reply is None:
            self.reply = MinimumRate(self.handler.limits, float("inf"))
        self.handler.writer.write(out)
        try:
            async with asyncio.timeout(self.reply.left()):
                await self.handler.writer.drain()
        except TimeoutError:
            raise ReplyTooSlow from None
        self.reply.bytes += len(out)


def _listen(host: str, port: int) -> list[socket.socket]:
    out = []
    for family, _, _, _, address in socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        out.append(socket.create_server(address[:2], family=family, backlog=_BACKLOG))
        out[-1].setblocking(False)
    return out


def _abort(transport: asyncio.Transport | None, accepted: socket.socket) -> None:
    """Close at once and discard unread data. Without a transport one is being made, which has the socket's
    number: closing that here could close another socket later."""
    try:
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if transport is None:
            accepted.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed
        pass
    if transport is not None:
        transport.abort()
