"""A small server of live pages. It answers GET for a page and, at `/state` before its path, for the state by
which the page learns that there is something new.

On the loopback address it answers only to that name: a page from elsewhere that has its own name resolved to
this machine is refused. On any other address it answers only by TLS, and only those who have the password."""

from __future__ import annotations

import base64
import binascii
import errno
import json
import secrets
import ssl
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import unquote

from holdfast.core.errors import ConfigError, HoldfastError

HOST = "127.0.0.1"
USER = "watch"
_CONNECTIONS = 64  # that are answered at a time
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageState(Protocol):
    """What a page's state has to say."""

    @property
    def finished(self) -> bool: ...

    @property
    def words(self) -> str: ...

    def plain(self) -> dict[str, Any]: ...


class Pages(Protocol):
    """Pages by their paths; many threads may ask."""

    def has(self, path: str) -> bool: ...

    def state(self, path: str = "/") -> PageState: ...

    def page(self, path: str = "/") -> str: ...


@dataclass(frozen=True)
class PublicAddress:
    """How other machines reach a server: its address, the names in its certificate, the password."""

    listen: str
    names: Collection[str]
    context: ssl.SSLContext
    password: str


class PageServer(ThreadingHTTPServer):
    """Serves pages until it is closed. `noted` is called once, when what they show is finished."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self,
        viewed: Pages,
        port: int = 0,
        noted: Callable[[str], None] = lambda words: None,
        public: PublicAddress | None = None,
    ):
        self.viewed, self.noted, self.public = viewed, noted, public
        self._told = False
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        try:
            super().__init__((HOST if public is None else public.listen, port), _Handler)
        except PermissionError:
            raise ConfigError(f"--port {port}: not allowed here; choose one above 1023") from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"--port {port}: in use by another program; choose another, or none for a free one"
                ) from None
            if public is not None:
                raise ConfigError(f"--listen {public.listen}: {error.strerror or error}") from None
            raise
        if public is not None:  # the handshake is made by the thread of the connection
            self.socket = public.context.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        if self.public is None:
            return f"http://{HOST}:{self.port}/"
        return f"https://{next(iter(self.public.names), self.public.listen)}:{self.port}/"

    @property
    def names(self) -> set[str]:
        """The host names by which a browser may ask for it."""
        hosts, usual = ((HOST, "localhost"), 80) if self.public is None else (self.public.names, 443)
        return {f"{host}:{self.port}" for host in hosts} | (set(hosts) if self.port == usual else set())

    def admits(self, header: str | None) -> bool:
        """Return whether a request with this Authorization header may be answered."""
        if self.public is None:
            return True
        kind, _, given = (header or "").partition(" ")
        try:
            user, _, password = base64.b64decode(given, validate=True).decode().partition(":")
        except (binascii.Error, ValueError):
            return False
        good = secrets.compare_digest(password.encode(), self.public.password.encode())
        return kind.lower() == "basic" and user == USER and good

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; beyond so many connections a new one is closed."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def service_actions(self) -> None:
        """Between requests: report once on the terminal that the job is done."""
        if not self._told:
            try:
                state = self.viewed.state()
            except HoldfastError:
                return
            if state.finished:
                self._told = True
                self.noted(state.words)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that closes the connection in the middle of an answer."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "holdfast", ""
    timeout = 30  # seconds for a client that says nothing

    def do_GET(self) -> None:
        if self.headers.get_all("Host") not in [[name] for name in self.server.names]:
            return self._answer(
                HTTPStatus.FORBIDDEN,
                "text/plain",
                "open this page on the same machine, with the printed address"
                if self.server.public is None
                else "open this page by a name that the certificate has",
            )
        if not self.server.admits(self.headers.get("Authorization")):
            return self._answer(HTTPStatus.UNAUTHORIZED, "text/plain", "give the user and the password")
        viewed, asked = self.server.viewed, unquote(self.path)
        about = asked.removeprefix("/state") or "/"
        if asked == "/state/" or not viewed.has(about):
            return self._answer(HTTPStatus.NOT_FOUND, "text/plain", "not found")
        try:
            if asked == about:
                return self._answer(HTTPStatus.OK, "text/html", viewed.page(about))
            self._answer(HTTPStatus.OK, "application/json", json.dumps(viewed.state(about).plain()))
        except HoldfastError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error))

    def _refuse(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", "only GET")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode(errors="replace")
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", 'Basic realm="holdfast"')
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print no line for a request."""
