"""The resident trainer of a node: it keeps torch, the config and the data in memory, so a round does not
begin with an import.

    python -m holdfast.deploy.trainer --socket PATH

The process that talks to the server passes the request on through a Unix socket that only the node's owner
can open. A frame is the length of a JSON index, the index, and the arrays' bytes:
nothing in it can run code."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from holdfast.core.errors import in_print
from holdfast.core.reading import is_whole, parse_json
from holdfast.deploy.heartbeat import show_life
from holdfast.deploy.memory import give_back_memory
from holdfast.deploy.sockets import listen

_MOST = 1 << 34  # bytes of the arrays of a frame: more is a mistake
_INDEX = 1 << 26  # bytes of its index
_PIECE = 1 << 20  # bytes that are read at a time
_IDLE = (
    120.0  # seconds for the next piece of a frame: who stops in the middle must not keep the others waiting
)


def ask(
    path: str, content: RecordDict, node: Mapping[str, Any], run: Mapping[str, Any], attempt: str
) -> RecordDict | None:
    """Return the trainer's answer; None if none listens. An error of the trainer is raised here."""
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


def serve(path: Path) -> None:
    """Answer one request after the other, for ever; the socket is removed with the process."""
    from holdfast.deploy.node_worker import NodeWorker

    worker = NodeWorker()
    with listen(path) as listener:
        try:
            while True:
                line, _ = listener.accept()
                with line:
                    line.settimeout(_IDLE)
                    try:
                        # else it was only a check whether a trainer listens
                        if line.recv(1, socket.MSG_PEEK):
                            _answer(line, worker)
                            give_back_memory()
                    except (OSError, ValueError) as error:  # the other side is gone, or it is another program
                        print(f"a request failed: {error}", file=sys.stderr, flush=True)
        finally:
            path.unlink(missing_ok=True)


def _answer(line: socket.socket, worker: Any) -> None:
    said, content = _receive(line)
    try:
        reply, outcome = worker.perform(content, said["node"], said["run"], str(said["attempt"])), {}
    except Exception as error:  # the server gets any error, and the next request is answered
        traceback.print_exc()
        worker.node = None
        reply, outcome = RecordDict(), {"error": f"{type(error).__name__}: {error}"}
    _send(line, outcome, reply)


def _send(line: socket.socket, about: Mapping[str, Any], content: RecordDict) -> None:
    records: dict[str, Any] = {}
    pieces: list[bytes] = []
    for name, record in content.items():
        if isinstance(record, ConfigRecord):
            records[name] = {"config": {key: _plain(value) for key, value in record.items()}}
        elif isinstance(record, ArrayRecord):
            records[name] = {
                "arrays": {key: [a.dtype, list(a.shape), a.stype, len(a.data)] for key, a in record.items()}
            }
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
    """Read a frame; raise a ValueError if it is not one. Any program that can open the socket can write to
    it, and the trainer must survive that."""
    long, rest = struct.unpack("<QQ", _exactly(line, 16))
    if long > _INDEX or rest > _MOST:
        raise ValueError(f"a frame with an index of {long} bytes and {rest} bytes of arrays")
    index = parse_json(_exactly(line, long))
    records = index.get("records") if isinstance(index, dict) else None
    if not isinstance(records, dict) or not isinstance(index.get("about"), dict):
        raise ValueError("the index of a frame has no table of records or does not say what it is about")
    if sum(_sizes(records)) != rest:
        raise ValueError(f"the arrays of a frame do not have the {rest} bytes that it says")
    try:
        return index["about"], RecordDict({name: _record(line, record) for name, record in records.items()})
    except (KeyError, TypeError, OverflowError) as error:  # Flower's records check their own values
        raise ValueError(f"a record of a frame cannot be read: {in_print(str(error))[:200]}") from None


def _sizes(records: Mapping[str, Any]) -> Iterator[int]:
    """Check the index of a frame and yield the bytes of every array in it."""
    for record in records.values():
        if not isinstance(record, dict) or not isinstance(record.get("config", {}), dict):
            raise ValueError("a record of a frame is neither settings nor arrays")
        arrays = record.get("arrays", {})
        if not isinstance(arrays, dict) or ("arrays" in record) == ("config" in record):
            raise ValueError("a record of a frame is neither settings nor arrays")
        for about in arrays.values():
            sound = (
                isinstance(about, list)
                and len(about) == 4
                and isinstance(about[0], str)
                and isinstance(about[2], str)
            )
            if not sound or not is_whole(about[3], most=_MOST) or not _is_shape(about[1]):
                raise ValueError("an array of a frame is not described by dtype, shape, kind and size")
            yield about[3]


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(is_whole(size, most=2**63 - 1) for size in value)


def _record(line: socket.socket, record: Mapping[str, Any]) -> ConfigRecord | ArrayRecord:
    if "config" in record:
        return ConfigRecord(record["config"])
    arrays = {}
    for key, (dtype, shape, stype, size) in record["arrays"].items():
        arrays[key] = Array(dtype=dtype, shape=tuple(shape), stype=stype, data=_exactly(line, size))
    return ArrayRecord(arrays)


def _exactly(line: socket.socket, size: int) -> bytes:
    """Read so many bytes. Memory is taken as they come: a size is only a claim."""
    data = bytearray()
    while len(data) < size:
        more = line.recv(min(size - len(data), _PIECE))
        if not more:
            raise ValueError("the connection was closed")
        data += more
    return bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m holdfast.deploy.trainer", description="A node's resident trainer."
    )
    parser.add_argument("--socket", required=True, type=Path)
    given = parser.parse_args()
    show_life()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    serve(given.socket)


if __name__ == "__main__":
    main()
