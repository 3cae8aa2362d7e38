"""The resident trainer: frames that come out as they went in, and a process that gives the same bits as
none."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict  # noqa: E402

from holdfast.core.errors import RunError  # noqa: E402
from holdfast.deploy import sockets, trainer  # noqa: E402
from holdfast.deploy.server_app import serve  # noqa: E402
from tests.deploy.local_grid import LocalGrid  # noqa: E402
from tests.deploy.worlds import assert_same_runs, simulate, write_config  # noqa: E402


def test_frames_come_out_as_they_went_in() -> None:
    here, there = socket.socketpair()
    arrays = {
        "a": Array(np.arange(6.0).reshape(2, 3)),
        "none": Array(np.zeros((0, 4))),
        "b": Array(np.array(7)),
    }
    content = RecordDict(
        {
            "header": ConfigRecord({"run": "x", "pick": [0, -1], "discard_state": False}),
            "bank": ArrayRecord(arrays),
        }
    )
    sender = threading.Thread(target=trainer._send, args=(here, {"attempt": "3"}, content))
    sender.start()
    about, got = trainer._receive(there)
    sender.join()
    assert about == {"attempt": "3"} and dict(got["header"]) == dict(content["header"])
    assert {name: array.data for name, array in got["bank"].items()} == {
        name: array.data for name, array in arrays.items()
    }


@pytest.mark.parametrize(
    "frame", [b"", b"x" * 16, b"\xff" * 16 + b"{}", (4).to_bytes(8, "little") + bytes(8) + b"nope"]
)
def test_bytes_that_are_not_a_frame_are_refused(frame: bytes) -> None:
    here, there = socket.socketpair()
    here.sendall(frame)
    here.close()
    with pytest.raises(ValueError):
        trainer._receive(there)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose path leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="hf", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_with_a_trainer_the_same_bits_as_without(tmp_path: Path, short: Path) -> None:
    config, path = write_config(tmp_path, "ditto"), sockets.socket_of(tmp_path / "node0")
    assert path.parent.stat().st_mode & 0o777 == 0o700 and len(str(path.name)) < 30
    threading.Thread(target=trainer.serve, args=(path,), daemon=True).start()
    settings = {"config": str(config), "out": str(tmp_path / "fed"), "deadline": 20.0, "join": 20.0}
    grid = LocalGrid(tmp_path / "nodes", settings)
    end = time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert path.stat().st_mode & 0o077 == 0
    for context in grid.nodes.values():
        context.node_config["trainer"] = str(path)
    serve(grid, settings)
    assert_same_runs(simulate(config, tmp_path / "sim"), tmp_path / "fed", 2)
    request = next(message.content for message in grid.asked if message.metadata.message_type == "train")
    with pytest.raises(RuntimeError, match="ValueError: this SuperNode has no client-id"):
        trainer.ask(str(path), request, {}, settings, "1")
    assert trainer.ask(str(tmp_path / "nobody.sock"), request, {}, settings, "1") is None


def test_a_folder_of_another_user_is_not_used(short: Path) -> None:
    (short / f"holdfast-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(RunError, match="open to others"):
        sockets.socket_of(short)


def test_a_long_path_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("x" * 80)))
    assert len(str(sockets.socket_of(tmp_path))) < 100


def test_only_sockets_without_a_listener_are_removed(short: Path, tmp_path: Path) -> None:
    live, dead = sockets.socket_of(tmp_path / "live"), sockets.socket_of(tmp_path / "dead")
    sockets.listen(dead).close()  # as a process that was killed leaves it
    with sockets.listen(live):
        sockets.remove_left_over()
        assert live.exists() and not dead.exists()
        assert sorted(live.parent.iterdir()) == [live]
    sockets.remove_left_over()
    assert list(live.parent.iterdir()) == []


def test_a_link_of_another_user_is_not_followed(short: Path, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(mode=0o700)
    sockets.listen(tmp_path / "private" / "x.sock").close()
    (short / f"holdfast-{os.getuid()}").symlink_to(tmp_path / "private")
    with pytest.raises(RunError, match="belongs to another user"):
        sockets.socket_of(short)
    sockets.remove_left_over()
    assert (tmp_path / "private" / "x.sock").exists()
