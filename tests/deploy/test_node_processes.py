"""What may happen to a node of a real federation on its own machine: its connection breaks, it freezes,
another user of the machine poses as its client, the disk is full."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from holdfast.core.errors import RunError  # noqa: E402
from holdfast.deploy.project import Project  # noqa: E402
from holdfast.deploy.sockets import socket_of  # noqa: E402
from holdfast.deploy.up import RunningFederation  # noqa: E402
from tests.deploy.real_federation import PATIENT, found, model_of, run_federation, simulated  # noqa: E402

pytestmark = pytest.mark.slow


def assert_same_model(project: Project, folder: Path, rounds: int = 3) -> None:
    assert torch.equal(model_of(project.run), model_of(simulated(project, folder / "sim")))
    assert [entry.round for entry in project.ledger().of("round")] == list(range(1, rounds + 1))


def after_each_round(*acts: Callable[[RunningFederation], None]) -> Callable[[RunningFederation, str], None]:
    """The first act after round 1, the next after round 2."""
    left = list(acts)

    def disturb(up: RunningFederation, line: str) -> None:
        if re.match(r"round \d+: \d+ took part", line) and left:
            left.pop(0)(up)

    return disturb


@contextmanager
def closing_listener(port: int) -> Iterator[None]:
    """Something that takes every connection and closes it at once."""
    with socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(("127.0.0.1", port))
        door.listen(64)
        done = threading.Event()

        def serve() -> None:
            door.settimeout(0.2)
            while not done.is_set():
                try:
                    door.accept()[0].close()
                except TimeoutError:
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def test_a_break_of_the_connection_loses_no_node(tmp_path: Path) -> None:
    """25 seconds in which something else is at the server's port, and 25 in which the proxy is frozen.
    `quorum` 1: each round waits for every node."""
    project = found(tmp_path, clients=2, rounds=3, method="ditto", quorum=1.0, wait=300.0)

    def replace_proxy(up: RunningFederation) -> None:
        up.processes.started["proxy"].kill()
        up.processes.started["proxy"].wait()
        with closing_listener(project.settings.port):
            time.sleep(25)

    def freeze_proxy(up: RunningFederation) -> None:
        up.processes.started["proxy"].send_signal(signal.SIGSTOP)
        time.sleep(25)
        up.processes.started["proxy"].send_signal(signal.SIGCONT)

    _, said = run_federation(project, disturb=after_each_round(replace_proxy, freeze_proxy))
    assert_same_model(project, tmp_path)
    assert not [line for line in said if re.match(r"node\d .*started again", line)], (
        "both have waited, so no request was lost"
    )
    lines = [line for line in said if "the server" in line]
    assert any(
        re.fullmatch(r"node\d(, node\d)? cannot reach the server and will retry", line) for line in lines
    ), said
    assert any(re.fullmatch(r"node\d(, node\d)? can reach the server again", line) for line in lines), said


@pytest.mark.long
def test_a_frozen_node_is_started_again(tmp_path: Path) -> None:
    """A SuperNode, then a trainer: stopped in the midst of a round, which a process that ended would be
    noticed by and these are not."""
    project = found(tmp_path, clients=2, rounds=3, quorum=1.0, wait=PATIENT, deadline=60.0)

    def freeze(name: str) -> Callable[[RunningFederation], None]:
        def act(up: RunningFederation) -> None:
            up.processes.freeze_limit = 15.0
            up.processes.started[name].send_signal(signal.SIGSTOP)

        return act

    _, said = run_federation(project, disturb=after_each_round(freeze("node1"), freeze("trainer0")))
    assert_same_model(project, tmp_path)
    for name in ("node1", "trainer0"):
        assert f"{name} gave no sign of life for 15 s and is restarted" in said
    assert not [client for client in range(2) if socket_of(project.node(client)).exists()]


def test_another_user_of_the_nodes_machine_finds_no_port_and_no_secret(tmp_path: Path) -> None:
    """While a real run plays, the ports of the nodes' processes and the process list are read. Flower's
    SuperNode has a port on 127.0.0.1, where every user of the machine can ask it for the server's messages;
    the processes of a node here have none."""
    project = found(tmp_path, clients=2, rounds=2, quorum=1.0, wait=PATIENT)
    listed: set[bytes] = set()
    seen: list[tuple[str, int]] = []
    done = threading.Event()

    def begin(up: RunningFederation) -> None:
        for name, process in up.processes.started.items():
            seen.extend((name, port) for port in _ports_of(process.pid))
        threading.Thread(target=read_process_list, args=(up,), daemon=True).start()

    def read_process_list(up: RunningFederation) -> None:
        while not done.wait(0.05):
            for pid in up.processes.alive():
                try:
                    listed.add(Path(f"/proc/{pid}/cmdline").read_bytes())
                except OSError:
                    pass

    run_federation(project, disturb=after_each_round(begin))
    done.set()
    assert {name for name, _ in seen} == {"superlink", "proxy"}
    assert_same_model(project, tmp_path, 2)
    assert any(b"holdfast.deploy.forks" in line for line in listed)
    secret = (project.server / "superexec.secret").read_bytes()
    for line in listed:
        assert not re.search(rb"[0-9a-f]{64}", line) and b"--token\0" not in line and secret not in line, line
    for folder in (project.logs, project.server / "run", project.node(0) / "state"):
        assert not [
            path
            for path in (folder, *folder.rglob("*"))
            if path.lstat().st_mode & 0o077 and path.suffix != ".pem"
        ]


def _ports_of(pid: int) -> list[int]:
    """The TCP ports on which a process listens."""
    inodes = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    out = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                out.append(int(words[1].rpartition(":")[2], 16))
    return out


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=150m", "tmpfs", str(folder)], capture_output=True
    )
    if made.returncode != 0:
        pytest.skip("no small disk can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_space(
    small_disk: Path, tmp_path: Path
) -> None:
    project = found(small_disk, clients=2, rounds=2, quorum=1.0, wait=120.0)
    filler = small_disk / "filler"

    def fill(_: RunningFederation) -> None:
        with open(filler, "wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    pass

    with pytest.raises(RunError) as stopped:
        run_federation(project, disturb=after_each_round(fill))
    assert f"the disk that holds {project.server} is full" in str(stopped.value)
    assert f"then `holdfast federation resume {project.path}` continues it" in str(
        stopped.value
    ) and "\n" not in str(stopped.value)
    filler.unlink()
    up, _ = run_federation(project)
    assert up.processes.alive() == []
    assert_same_model(project, tmp_path, 2)
