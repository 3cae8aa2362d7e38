"""Metrics of a running federation for Prometheus, as its text format, on 127.0.0.1 only. Off unless
`metrics` in federation.toml, or `up --metrics`, names a port."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.deploy.overview import Overlook, Overview
from holdfast.deploy.processes import HOST
from holdfast.deploy.project import Project

_KIND = "text/plain; version=0.0.4; charset=utf-8"
Sample = tuple[Mapping[str, str], float]


def prometheus_text(seen: Overview) -> str:
    """Return all metrics in Prometheus' text format."""
    last, (up, down) = (seen.rounds[-1] if seen.rounds else None), seen.bytes
    parts = {} if last is None else dict(last.parts)
    if last is not None and last.seconds is not None:
        parts["all"] = last.seconds
    wire = seen.traffic.nodes.values()
    states = {name: seen.count(name) for name in ("active", "paused", "banned", "left")}
    states |= {"known": len(seen.nodes), "present": sum(node.present for node in seen.nodes)}
    metrics: list[tuple[str, str, str, Iterable[Sample]]] = [
        ("up", "gauge", "1 while the processes of the federation run.", one(seen.state == "up")),
        ("finished", "gauge", "1 when the run has ended.", one(seen.state == "finished")),
        ("ledger_good", "gauge", "0 when the ledger cannot be read to its end.", one(not seen.problem)),
        ("ledger_entries", "gauge", "Entries of the ledger.", one(seen.entries)),
        ("round", "gauge", "The last committed round of the run.", one(seen.round)),
        ("rounds_planned", "gauge", "Rounds of the run in all.", one(seen.planned)),
        ("accuracy", "gauge", "Accuracy of the last round that was measured.", one(seen.accuracy)),
        (
            "last_commit_timestamp_seconds",
            "gauge",
            "When the last round was committed, in seconds since the epoch.",
            one(seen.committed),
        ),
        ("seconds_left", "gauge", "Seconds until the end, estimated.", one(seen.left)),
        (
            "round_seconds",
            "gauge",
            "Seconds of the last round: all of it, and by part.",
            labelled("part", parts),
        ),
        (
            "nodes",
            "gauge",
            "Nodes by state; known ones are all that were enrolled.",
            labelled("state", states),
        ),
        ("missing_nodes", "gauge", "Nodes that did not answer in the last round.", one(_missing(seen))),
        (
            "refused_replies_total",
            "counter",
            "Refused replies and requests that were strikes, by reason.",
            labelled("reason", seen.reasons),
        ),
        (
            "refused_requests_total",
            "counter",
            "Requests of nodes that the proxy refused, by kind.",
            labelled("kind", seen.traffic.refused),
        ),
        (
            "unauthenticated_requests_total",
            "counter",
            "Requests without a registered key.",
            one(seen.traffic.unauthenticated),
        ),
        (
            "bytes_total",
            "counter",
            "Bytes of the updates (up) and models (down) of all rounds of the run.",
            labelled("direction", {"up": up, "down": down}),
        ),
        (
            "proxy_bytes_total",
            "counter",
            "Bytes of bodies through the proxy.",
            labelled("direction", {"up": sum(n.up for n in wire), "down": sum(n.down for n in wire)}),
        ),
    ]
    return "".join(
        _metric(f"holdfast_{name}", kind, words, samples) for name, kind, words, samples in metrics
    )


def one(value: float | None) -> list[Sample]:
    return [] if value is None else [({}, float(value))]


def labelled(label: str, values: Mapping[str, float]) -> list[Sample]:
    return [({label: name}, float(value)) for name, value in sorted(values.items())]


def _missing(seen: Overview) -> int | None:
    return len(seen.rounds[-1].missing) if seen.rounds else None


def _metric(name: str, kind: str, words: str, samples: Iterable[Sample]) -> str:
    lines = [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        lines.append(f"{name}{{{inside}}} {value:.17g}" if inside else f"{name} {value:.17g}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class MetricsServer:
    """Answers GET /metrics on 127.0.0.1, in a thread, until it is closed."""

    def __init__(self, project: Project, port: int):
        self.look = Overlook(project)
        self._lock = threading.Lock()
        try:
            self._server = ThreadingHTTPServer((HOST, port), _handler(self))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise ConfigError(
                f"metrics: port {port} of {HOST} cannot be used ({error.strerror}); choose another, or 0"
            ) from None
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._server.server_address[1]}/metrics"

    def text(self) -> str:
        with self._lock:  # the reader keeps what it has read
            return prometheus_text(self.look.look())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def _handler(metrics: MetricsServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version, timeout = "holdfast", "", 30

        def do_GET(self) -> None:
            """A page from elsewhere that has its own name resolved to this machine is refused."""
            name = (self.headers.get("Host") or "").rpartition(":")[0]
            if name not in (HOST, "localhost"):
                self._answer(HTTPStatus.FORBIDDEN, "ask by 127.0.0.1 or localhost\n")
            elif self.path != "/metrics":
                self._answer(HTTPStatus.NOT_FOUND, "only /metrics\n")
            else:
                try:
                    self._answer(HTTPStatus.OK, metrics.text())
                except HoldfastError as error:
                    self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n")

        def _answer(self, status: HTTPStatus, text: str) -> None:
            content = text.encode()
            self.send_response(status)
            for header, value in {"Content-Type": _KIND, "Content-Length": str(len(content))}.items():
                self.send_header(header, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Print no line for a request."""

    return Handler
