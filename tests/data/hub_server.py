"""As much of the Hub as downloading a dataset needs, on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Files = Mapping[str, bytes]
SHA = {"main": "a" * 40, "refs/convert/parquet": "b" * 40}


class Hub(ThreadingHTTPServer):
    """Datasets by id, then by revision, then by path."""

    daemon_threads = True

    def __init__(self, datasets: Mapping[str, Mapping[str, Files]]):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.datasets = datasets
        self.asked: list[tuple[str, str, str]] = []  # method, path, token
        self.broken: set[str] = set()  # paths of which only half is sent
        self.gated: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fetched(self) -> list[str]:
        paths = [path for method, path, _ in self.asked if method == "GET" and "/resolve/" in path]
        return sorted(path.partition("/resolve/")[2].partition("/")[2] for path in paths)

    def files(self, name: str, revision: str) -> Files | None:
        by_sha = {SHA[known]: files for known, files in self.datasets[name].items()}
        return self.datasets[name].get(revision, by_sha.get(revision))


@contextmanager
def serving(datasets: Mapping[str, Mapping[str, Files]]) -> Iterator[Hub]:
    hub = Hub(datasets)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append((self.command, path, self.headers.get("authorization", "")))
        about = path.removeprefix("/api").removeprefix("/datasets/").split("/")
        name, rest = "/".join(about[:2]), about[2:]
        if name in self.server.gated:
            return self._refuse(403, "GatedRepo")
        if name not in self.server.datasets:
            return self._refuse(404, "RepoNotFound")
        verb = rest[0] if rest else "revision"
        revision, inside = self._revision("/".join(rest[1:]) or "main")
        files = self.server.files(name, revision)
        if files is None:
            return self._refuse(404, "RevisionNotFound")
        sha = SHA.get(revision, revision)
        if verb == "revision":
            siblings = [
                {"rfilename": file, "size": len(content), "blobId": _etag(content)}
                for file, content in files.items()
            ]
            return self._json({"id": name, "sha": sha, "siblings": siblings})
        if verb == "tree":
            return self._json(
                [{"type": "file", "path": file, "size": len(c), "oid": _etag(c)} for file, c in files.items()]
            )
        self._file(files[inside], sha, inside)

    def _revision(self, rest: str) -> tuple[str, str]:
        for known in (*SHA, *SHA.values()):
            if rest == known or rest.startswith(f"{known}/"):
                return known, rest[len(known) + 1 :]
        return rest, ""

    def _file(self, content: bytes, sha: str, path: str) -> None:
        begin = (
            int(self.headers["range"].removeprefix("bytes=").partition("-")[0])
            if self.headers.get("range")
            else 0
        )
        part = content[begin:]
        self.send_response(206 if begin else 200)
        for key, value in {
            "ETag": f'"{_etag(content)}"',
            "X-Repo-Commit": sha,
            "Content-Length": str(len(part)),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(part[: len(part) // 2] if path in self.server.broken else part)
            if path in self.server.broken:
                self.close_connection = True

    def _json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
