"""A process on the node that stays: it has torch, the config and the data in memory, so that a round costs seconds and not an import each.

    python -m holdfast.deploy.trainer --socket PATH

The ClientApp, which Flower starts anew for every message, passes the request on through a Unix socket that only the node's owner can open.
A frame is the length of a JSON index, the index, and the arrays' bytes: nothing in it can run code."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import struct
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from holdfast.core.errors import RunError

_MOST = 1 << 34  # bytes of a frame: more is a mistake


def ask(path: str, content: RecordDict, node: Mapping[str, Any], run: Mapping[str, Any], attempt: str) -> RecordDict | None:
    """The trainer's answer; None where none listens. What the trainer could not do is an error here."""
    if not path:
        return None
    with socket.socket(socket.AF_UNIX) as line:
        try:
            line.connect(path)
        except OSError:
            return None
        _send(line, {"node": dict(node), "run": dict(run), "attempt": attempt}, content)
        said, reply = _receive(line)
    if said.get("error"):
        raise RuntimeError(str(said["error"]))
    return reply


def socket_of(folder: Path) -> Path:
    """Where the trainer of a node listens. Not in the node's folder: the path of a Unix socket may have a hundred letters at most."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    home = Path(base if len(base) < 60 else "/tmp") / f"holdfast-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    about = home.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise RunError(f"{home} belongs to somebody else or is open to others; remove it, or set XDG_RUNTIME_DIR")
    return home / f"{hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:20]}.sock"


def serve(path: Path) -> None:
    """Answer one request after the other, for ever."""
    from holdfast.deploy.work import Workshop

    path.unlink(missing_ok=True)
    workshop = Workshop()
    with socket.socket(socket.AF_UNIX) as door:
        before = os.umask(0o177)
        try:
            door.bind(str(path))
        finally:
            os.umask(before)
        door.listen(4)
        while True:
            line, _ = door.accept()
            with line:
                try:
                    _answer(line, workshop)
                except (OSError, ValueError) as error:  # the asker is gone, or is no ClientApp
                    print(f"a request came to nothing: {error}", file=sys.stderr, flush=True)


def _answer(line: socket.socket, workshop: Any) -> None:
    said, content = _receive(line)
    try:
        reply, outcome = workshop.perform(content, said["node"], said["run"], str(said["attempt"])), {}
    except Exception as error:  # whatever it is, the server is told, and the next request is answered
        traceback.print_exc()
        workshop.node = None
        reply, outcome = RecordDict(), {"error": f"{type(error).__name__}: {error}"}
    _send(line, outcome, reply)


def _send(line: socket.socket, about: Mapping[str, Any], content: RecordDict) -> None:
    records: dict[str, Any] = {}
    pieces: list[bytes] = []
    for name, record in content.items():
        if isinstance(record, ConfigRecord):
            records[name] = {"config": {key: _plain(value) for key, value in record.items()}}
        elif isinstance(record, ArrayRecord):
            records[name] = {"arrays": {key: [a.dtype, list(a.shape), a.stype, len(a.data)] for key, a in record.items()}}
            pieces += [array.data for array in record.values()]
    index = json.dumps({"about": about, "records": records}).encode()
    line.sendall(struct.pack("<QQ", len(index), sum(map(len, pieces))) + index)
    for piece in pieces:
        line.sendall(piece)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        raise ValueError("a setting of bytes cannot be passed on")
    return value


def _receive(line: socket.socket) -> tuple[dict[str, Any], RecordDict]:
    long, rest = struct.unpack("<QQ", _exactly(line, 16))
    if long + rest > _MOST:
        raise ValueError(f"a frame of {long + rest} bytes")
    index = json.loads(_exactly(line, long))
    content = RecordDict()
    for name, record in index["records"].items():
        if "config" in record:
            content[name] = ConfigRecord(record["config"])
        else:
            arrays = {}
            for key, (dtype, shape, stype, size) in record["arrays"].items():
                arrays[key] = Array(dtype=dtype, shape=tuple(shape), stype=stype, data=_exactly(line, size))
            content[name] = ArrayRecord(arrays)
    return index["about"], content


def _exactly(line: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        more = line.recv_into(view[got:])
        if not more:
            raise ValueError("the line was cut")
        got += more
    return bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser("python -m holdfast.deploy.trainer", description="A node's resident trainer.")
    parser.add_argument("--socket", required=True, type=Path)
    serve(parser.parse_args().socket)


if __name__ == "__main__":
    main()
