"""The public port of a federation: TLS, and only the requests that nodes with a key may send.

Flower's SuperLink has its fleet, control and runtime interfaces on one port, and the control interface has no
authentication: anybody could register a key, or start a run, which is code on all nodes. So the SuperLink
listens on 127.0.0.1, and the proxy forwards to it what SuperNodes call, and nothing else. The sender of a
request is known from its headers, before its body is read (proxy_keys.py); what a request may contain is in
fleet_rules.py, and the limits of a connection are in proxy_limits.py. Offences are recorded with the key of
the node (refusals.py); unauthenticated requests are counted."""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import ssl
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.error.catalog import API_ERROR_MAP

from holdfast.deploy.fleet_rules import ANNOUNCE, CALLS, FLEET, PULL, PUSH, Refused, Rules
from holdfast.deploy.heartbeat import show_life
from holdfast.deploy.notices import POSTED, Notices
from holdfast.deploy.proxy_holds import Holds
from holdfast.deploy.proxy_keys import Keys, Node
from holdfast.deploy.proxy_limits import Limits, RefusalCounter
from holdfast.deploy.proxy_server import Server
from holdfast.deploy.refusals import Refusals
from holdfast.deploy.traffic import TrafficCounter

_SMALL = 128_000  # bytes of a body that needs no slot; a heartbeat has a hundred
_SLOTS = 16  # large bodies that are in memory at a time, of at most fleet_rules.LARGEST_OBJECT bytes
_SLOTS_OF_ONE_NODE = 2  # of them for one node: as many as a SuperNode sends at a time
_SLOT_WAIT = 60.0  # seconds to wait for a slot; then the node has to try again
_FILES = 65_536  # open files, two for each request
_AWAY = (502, 503, 504)  # the SuperLink has not answered at all
_UPSTREAM = 120.0  # seconds for an answer of the SuperLink
_AT_A_TIME = 3  # requests: its database has one writer, and those that wait for it sleep
_TURN = 25.0  # seconds to wait for a turn; then the node has to try again
_FORWARDED = {b"content-type", b"accept", b"user-agent"}
_OURS = b"flwr-"
_HOP_BY_HOP = {b"connection", b"transfer-encoding", b"keep-alive", b"upgrade", b"te", b"trailer"}
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


class Disconnected(Exception):
    """The node has closed the connection before the end of its request."""


class Quota:
    """Counts the bytes of replies that each key sends in a round, as accepted by the SuperLink. A round ends
    when a commit replaces the file `round`."""

    def __init__(self, most: int, round: Path | None):
        self.most, self.round = most, round
        self.sent: Counter[str] = Counter()
        self.mark = self._now()

    def allows(self, key: str, size: int) -> bool:
        if self._now() != self.mark:
            self.sent, self.mark = Counter(), self._now()
        return self.sent[key] + size <= self.most

    def count(self, key: str, size: int) -> None:
        self.sent[key] += size

    def _now(self) -> int:
        try:
            return 0 if self.round is None else self.round.stat().st_mtime_ns
        except FileNotFoundError:  # no round is committed yet
            return 0


class BodySlots:
    """Limits the large bodies in memory, in all and for one node. Waiting requests are served in turn, so the
    requests of one node delay another only for as long as its few slots take."""

    def __init__(self) -> None:
        self.all = asyncio.Semaphore(_SLOTS)
        self.own: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_SLOTS_OF_ONE_NODE))

    @asynccontextmanager
    async def one(self, node: Node, size: int) -> AsyncIterator[None]:
        if size <= _SMALL:
            yield
            return
        own = self.own[node.fingerprint]
        try:
            async with asyncio.timeout(_SLOT_WAIT):
                await own.acquire()
                try:
                    await self.all.acquire()
                except BaseException:
                    own.release()
                    raise
        except TimeoutError:
            raise Refused("waited too long for a slot; it may try again", "busy", 503) from None
        try:
            yield
        finally:
            self.all.release()
            own.release()


class Proxy:
    """An ASGI app in front of one SuperLink."""

    def __init__(
        self,
        upstream: str,
        context: ssl.SSLContext,
        keys: Keys,
        rules: Rules,
        quota: Quota | None = None,
        refusals: Refusals | None = None,
        counter: RefusalCounter | None = None,
        traffic: TrafficCounter | None = None,
        holds: Holds | None = None,
    ):
        self.upstream, self.keys, self.rules = upstream, keys, rules
        rules.numbers = lambda: keys.numbers.values()
        self.quota, self.refusals = quota or Quota(sys.maxsize, None), refusals or Refusals(None, None)
        self.counter, self.slots, self.holds = counter or RefusalCounter(), BodySlots(), holds
        self.turns = asyncio.Semaphore(_AT_A_TIME)
        self.traffic = traffic or TrafficCounter()
        # Its connections are as many as there are requests of nodes, which are bounded where they come in.
        self.client = httpx.AsyncClient(
            verify=context, timeout=_UPSTREAM, limits=httpx.Limits(max_connections=None), trust_env=False
        )

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, headers = (
            scope["path"],
            dict(reversed(scope["headers"])),
        )  # the first of several counts, as for the SuperLink
        node = self.keys.authenticate(headers)
        if node is None:
            self.counter.add("requests without a registered key")
            self.traffic.unauthenticated()
            self.traffic.save()
            await _reject(send, path)
            return
        scope.get("extensions", {}).get("node", lambda _: None)(node.fingerprint)
        self.traffic.request(node.fingerprint)
        try:
            await self._serve(scope, path, headers, node, receive, send)
        except Refused as no:
            self.traffic.refused(no.kind)
            if no.kind != "busy":
                self.refusals.record(node.fingerprint, no.kind, no.words, path, strike=no.offence)
            await _answer(send, no.status, no.words.encode())
        except Disconnected:  # an incomplete request is not forwarded
            return
        except TimeoutError:  # a node retries after no answer, and gives up after an error
            self.counter.add("bodies that came too slowly")
            raise
        except httpx.HTTPError:
            await _answer(send, 502, b"the SuperLink does not answer")
        finally:
            self.traffic.save()

    async def _serve(
        self,
        scope: dict[str, Any],
        path: str,
        headers: dict[bytes, bytes],
        node: Node,
        receive: Receive,
        send: Send,
    ) -> None:
        self.rules.check_path(path, scope["method"], scope.get("query_string", b""))
        size = _declared(headers)
        self.rules.check_size(path, size)
        pushes = path in (PUSH, ANNOUNCE)
        allowed = not pushes or self.quota.allows(node.fingerprint, size)
        async with self.slots.one(node, size if allowed else 0):
            body = await _body(receive, size, keep=allowed)
            self.traffic.up(node.fingerprint, size)
            if not allowed:  # possible for an honest node, when rounds are repeated or the quota is small
                raise Refused("has sent all that federation.quota allows in a round", "quota", 413)
            request = self.rules.check(path, body, node)
            done = await self._forward(path, scope["headers"], body, request, node, send)
        if pushes and done:
            self.quota.count(node.fingerprint, size)

    async def _forward(
        self, path: str, headers: list[tuple[bytes, bytes]], body: bytes, request: Any, node: Node, send: Send
    ) -> bool:
        kept = [(name, value) for name, value in headers if name in _FORWARDED or name.startswith(_OURS)]
        kept.append((b"accept-encoding", b"identity"))
        posted = self.holds.posted if self.holds is not None else 0
        async with AsyncExitStack() as stack:
            async with self._turn():  # it ends with the SuperLink's work, however slowly the node reads
                reply = await stack.enter_async_context(
                    self.client.stream("POST", self.upstream + path, content=body, headers=kept)
                )
            said = [
                (name.lower(), value) for name, value in reply.headers.raw if name.lower() not in _HOP_BY_HOP
            ]
            if path not in (PULL, ANNOUNCE, PUSH):
                await send({"type": "http.response.start", "status": reply.status_code, "headers": said})
                async for piece in reply.aiter_raw():
                    self.traffic.down(node.fingerprint, len(piece))
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
                return reply.is_success
            content = b"".join([piece async for piece in reply.aiter_raw()])
            self.traffic.down(node.fingerprint, len(content))
        # a refused announcement costs the database as much as an accepted one
        if reply.is_success or (path == ANNOUNCE and reply.status_code not in _AWAY):
            self.rules.take_note(path, request, content, node)
        if reply.is_success and self.holds is not None:
            self.holds.take_note(path, request, content, node)
            if path == PULL and not content:  # there is no message
                await self.holds.hold(posted)
        await _answer(
            send, reply.status_code, content, [pair for pair in said if pair[0] != b"content-length"]
        )
        return reply.is_success

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait until the SuperLink has few other requests of nodes."""
        try:
            async with asyncio.timeout(_TURN):
                await self.turns.acquire()
        except TimeoutError:
            raise Refused("waited too long for the SuperLink; it may try again", "busy", 503) from None
        try:
            yield
        finally:
            self.turns.release()


def _declared(headers: dict[bytes, bytes]) -> int:
    """Return the declared length of the body. Flower's nodes declare it and send the body unencoded; other
    requests are refused, so nothing is ever unpacked."""
    if (
        b"content-encoding" in headers
        or b"transfer-encoding" in headers
        or not headers.get(b"content-length", b"").isdigit()
    ):
        raise Refused("sent a body that is encoded or of unknown length", "form", 411)
    return int(headers[b"content-length"])


async def _body(receive: Receive, size: int, keep: bool) -> bytes:
    """Read the body. One that is not kept is read all the same: a node that is still sending would not read
    the answer."""
    parts, length, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        more, part = message.get("more_body", False), message.get("body", b"")
        length += len(part)
        if length > size:
            raise Refused("sent more than it declared", "form", 400)
        if keep:
            parts.append(part)
    return b"".join(parts)


async def _reject(send: Send, path: str) -> None:
    """Reject an unauthenticated request. A SuperNode explains a refusal only for these two errors of
    Flower."""
    disabled, failed = (
        ApiErrorCode.FLEET_SUPERNODE_REGISTRATION_DISABLED,
        ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED,
    )
    code = {FLEET + "register-node": disabled, FLEET + "activate-node": failed}.get(path)
    if code is not None:
        about = API_ERROR_MAP[code]
        said = json.dumps({"code": int(code), "detail": about.public_message})
        await _answer(send, about.http_status_code, said.encode(), _JSON)
    elif path in CALLS:
        await _answer(send, 401, json.dumps({"detail": "Invalid SuperNode authentication"}).encode(), _JSON)
    else:
        await _answer(send, 403, b"fleet only")


_JSON = [(b"content-type", b"application/json")]


async def _answer(
    send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*(headers or []), (b"content-length", b"%d" % len(body))],
        }
    )
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m holdfast.deploy.proxy", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    for name in ("--host", "--upstream", "--authority", "--certificate", "--key"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--registered", type=Path, required=True, help="the registered keys, as `up` writes them"
    )
    parser.add_argument("--refusals", type=Path, help="file for the offences of nodes")
    parser.add_argument("--traffic", type=Path, help="file for when nodes were seen, and their bytes")
    parser.add_argument(
        "--largest",
        type=int,
        default=64_000_000,
        help="bytes of one request; Flower sends models in pieces of 5 MB",
    )
    parser.add_argument("--objects", type=int, default=1000, help="objects that one reply may consist of")
    parser.add_argument(
        "--quota", type=int, default=sys.maxsize, help="bytes of replies that a node may send in a round"
    )
    parser.add_argument("--round", type=Path, help="the file that every committed round replaces")
    parser.add_argument(
        "--notices", type=Path, help="the server's folder, which names the sockets of notices"
    )
    for limit in fields(Limits):
        parser.add_argument(
            f"--{limit.name.replace('_', '-')}",
            type=type(limit.default),
            default=limit.default,
            help="see proxy_limits.py",
        )
    given = parser.parse_args()
    show_life()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(given.certificate, given.key)
    context.options |= ssl.OP_NO_RENEGOTIATION
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, _FILES), most))
    counter, limits = (
        RefusalCounter(),
        Limits(**{limit.name: getattr(given, limit.name) for limit in fields(Limits)}),
    )

    async def serve() -> None:
        notices = None if given.notices is None else Notices(given.notices, POSTED)
        holds = Holds(notices)
        proxy = Proxy(
            given.upstream,
            ssl.create_default_context(cafile=given.authority),
            Keys(given.registered),
            Rules(given.largest, given.objects),
            Quota(given.quota, given.round),
            Refusals(given.refusals, given.round),
            counter,
            TrafficCounter(given.traffic),
            holds,
        )
        await Server(proxy, context, limits, counter, holds.end).serve(given.host, given.port)
        if notices is not None:
            notices.close()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
