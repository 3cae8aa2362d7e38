"""The only door to the outside: TLS, and nothing but the paths that nodes need.

Flower's SuperLink has its fleet, control and runtime interfaces on one port, and the control interface asks nobody who he is: a stranger
could register a key of his own, or start a run, which is code on all nodes. So the SuperLink listens on 127.0.0.1, and this forwards only
/v1/fleet/ to it. A body that is larger than agreed is refused before it is forwarded, and so is what a node sends when it has sent its
share of the round."""

from __future__ import annotations

import argparse
import asyncio
import base64
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from holdfast.core.errors import ConfigError
from holdfast.deploy.enrolment import fingerprint_of

FLEET = "/v1/fleet/"
_SMALL = 999_999  # bytes
_LARGE_ONES = 16
_PATIENCE = 120.0  # seconds for the whole of a body
IDLE = 75
"""Seconds that a connection may rest: well beyond the 5 after which a sender drops it itself, so that it never sends into a closing one."""
PUSH = FLEET + "push-"
"""Replies and their parts; a heartbeat is never too much."""
_KEY = b"flwr-public-key"
_HOP_BY_HOP = {b"host", b"content-length", b"connection", b"transfer-encoding", b"keep-alive", b"upgrade", b"proxy-authorization", b"te"}
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


class TooLarge(Exception):
    pass


class Gone(Exception):
    pass


class Quota:
    """How many bytes of replies each key may still send in this round. A round is over when `round`, the file that a commit replaces, is
    another one. Counted is what the SuperLink took: it has checked the signature, so nobody can use up what is another's."""

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


class Proxy:
    """An ASGI app in front of one SuperLink."""

    def __init__(self, upstream: str, context: ssl.SSLContext, largest: int, quota: Quota | None = None):
        self.upstream, self.largest, self.quota = upstream, largest, quota or Quota(sys.maxsize, None)
        self.room = asyncio.Semaphore(_LARGE_ONES)
        self.client = httpx.AsyncClient(verify=context, timeout=120, limits=httpx.Limits(max_connections=256))

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Who it is that sends is known only to the SuperLink, which wants the whole body first: so only a few large ones are in memory at
        a time, however many strangers send them. The others wait, but not what keeps a node alive, which is small."""
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        large = b"transfer-encoding" in headers or len(headers.get(b"content-length", b"")) > len(str(_SMALL))
        async with self.room if large else nullcontext():
            await self._forward(scope, receive, send)

    async def _forward(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        path = scope["path"]
        if not path.startswith(FLEET) or ".." in path or "//" in path or scope.get("raw_path", path.encode()) != path.encode():
            await _answer(send, 403, b"fleet only")
            return
        headers = [(name, value) for name, value in scope["headers"] if name not in _HOP_BY_HOP]
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not declared.isdigit() or int(declared) > self.largest:
            await _answer(send, 413, b"too large")
            return
        query = f"?{scope['query_string'].decode('latin-1')}" if scope.get("query_string") else ""
        try:
            content = b"".join([chunk async for chunk in self._body(receive)])
            key = _name(next((value for name, value in scope["headers"] if name == _KEY), b"")) if path.startswith(PUSH) else None
            if key is not None and not self.quota.allows(key, len(content)):
                print(f"key {key[:16]} has sent all that federation.quota allows in a round", file=sys.stderr, flush=True)
                raise TooLarge
            reply = await self.client.request(scope["method"], f"{self.upstream}{path}{query}", content=content, headers=headers)
        except Gone:  # with half of what it wanted to say, which nobody should take for all of it
            return
        except TooLarge:
            await _answer(send, 413, b"too large")
        except TimeoutError:
            await _answer(send, 408, b"too slow")
        except httpx.InvalidURL:
            await _answer(send, 400, b"no such path")
        except httpx.HTTPError:
            await _answer(send, 502, b"the SuperLink does not answer")
        else:
            if key is not None and reply.is_success:
                self.quota.count(key, len(content))
            kept = [(k.lower(), v) for k, v in reply.headers.raw if k.lower() not in (*_HOP_BY_HOP, b"content-encoding")]
            await _answer(send, reply.status_code, reply.content, kept)

    async def _body(self, receive: Receive) -> AsyncIterator[bytes]:
        """What the node sends, for as long as it is not more than agreed, whatever it declared."""
        size, more, end = 0, True, time.monotonic() + _PATIENCE
        while more:
            message = await asyncio.wait_for(receive(), max(0.0, end - time.monotonic()))
            if message["type"] == "http.disconnect":
                raise Gone
            more = message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > self.largest:
                raise TooLarge
            yield message.get("body", b"")


def _name(key: bytes) -> str:
    """Of the key itself, since base64 spells one in several ways; its first letters are in `holdfast federation clients`. What is no key
    has one name for all, and the SuperLink takes nothing of it."""
    try:
        return fingerprint_of(base64.b64decode(key))
    except (ValueError, ConfigError):
        return "without a key"


async def _answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [*(headers or []), (b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    parser = argparse.ArgumentParser("python -m holdfast.deploy.proxy", description=__doc__.splitlines()[0] if __doc__ else "")
    for name in ("--host", "--upstream", "--authority", "--certificate", "--key"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--largest", type=int, default=64_000_000, help="bytes of one request; Flower sends models in pieces of 5 MB")
    parser.add_argument("--quota", type=int, default=sys.maxsize, help="bytes of replies that a node may send in a round")
    parser.add_argument("--round", type=Path, help="the file that every committed round replaces")
    given = parser.parse_args()
    quota = Quota(given.quota, given.round)
    proxy = Proxy(given.upstream, ssl.create_default_context(cafile=given.authority), given.largest, quota)
    uvicorn.run(
        proxy, host=given.host, port=given.port, ssl_certfile=given.certificate, ssl_keyfile=given.key, log_level="warning",
        lifespan="off", server_header=False, timeout_keep_alive=IDLE,
    )  # fmt: skip


if __name__ == "__main__":
    main()
