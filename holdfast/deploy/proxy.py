"""The only door to the outside: TLS, and nothing but the paths that nodes need.

Flower's SuperLink has its fleet, control and runtime interfaces on one port, and the control interface asks nobody who he is: a stranger
could register a key of his own, or start a run, which is code on all nodes. So the SuperLink listens on 127.0.0.1, and this forwards only
/v1/fleet/ to it. A body that is larger than agreed is refused before it is forwarded."""

from __future__ import annotations

import argparse
import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import httpx
import uvicorn

FLEET = "/v1/fleet/"
_SMALL = 999_999  # bytes
_LARGE_ONES = 16
_PATIENCE = 120.0  # seconds for the whole of a body
_HOP_BY_HOP = {b"host", b"content-length", b"connection", b"transfer-encoding", b"keep-alive", b"upgrade", b"proxy-authorization", b"te"}
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


class TooLarge(Exception):
    pass


class Gone(Exception):
    pass


class Proxy:
    """An ASGI app in front of one SuperLink."""

    def __init__(self, upstream: str, context: ssl.SSLContext, largest: int):
        self.upstream, self.largest = upstream, largest
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


async def _answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [*(headers or []), (b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    parser = argparse.ArgumentParser("python -m holdfast.deploy.proxy", description=__doc__.splitlines()[0] if __doc__ else "")
    for name in ("--host", "--upstream", "--authority", "--certificate", "--key"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--largest", type=int, default=64_000_000, help="bytes of one request; Flower sends models in pieces of 5 MB")
    given = parser.parse_args()
    proxy = Proxy(given.upstream, ssl.create_default_context(cafile=given.authority), given.largest)
    uvicorn.run(
        proxy, host=given.host, port=given.port, ssl_certfile=given.certificate, ssl_keyfile=given.key, log_level="warning",
        lifespan="off", server_header=False,
    )  # fmt: skip


if __name__ == "__main__":
    main()
