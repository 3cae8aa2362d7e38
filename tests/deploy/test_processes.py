"""Keeping processes, and telling the SuperLink of keys and bans, with programs that are no Flower."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from holdfast.core.errors import ConfigError, RunError  # noqa: E402
from holdfast.core.files import write_json  # noqa: E402
from holdfast.core.reading import read_json  # noqa: E402
from holdfast.deploy.heartbeat import ServerContact, away_file  # noqa: E402
from holdfast.deploy.node_processes import client_of, keep_node  # noqa: E402
from holdfast.deploy.processes import HOST, LOST, Processes, free_port, in_use  # noqa: E402
from holdfast.deploy.project import Project, enrol, init  # noqa: E402
from holdfast.deploy.up import RunningFederation  # noqa: E402


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return init(tmp_path / "ward", 3, port=free_port())


class SuperLink:
    """What `flwr supernode` would say. `gone` makes it unreachable; `stop_after` is a stop after so many
    registrations."""

    def __init__(self) -> None:
        self.nodes: dict[str, str] = {}
        self.removed: list[str] = []
        self.gone, self.stop_after = False, 99

    def __call__(self, _: str, what: str, *arguments: str) -> dict[str, Any]:
        if self.gone:
            raise RunError("flwr supernode failed: could not connect")
        if what == "list":
            return {"nodes": [{"node-id": node} for node in self.nodes.values() if node not in self.removed]}
        if what == "unregister":
            if arguments[0] in self.removed:
                raise RunError("flwr supernode failed: [code: 24] Node ID not found for account.")
            self.removed.append(arguments[0])
            return {}
        key = Path(arguments[0]).read_text()
        if key in self.nodes:
            raise RunError("flwr supernode failed: [code: 23] Public key already in use.")
        self.nodes[key] = str(100 + len(self.nodes))
        if len(self.nodes) > self.stop_after:
            raise KeyboardInterrupt
        return {"node-id": int(self.nodes[key])}


def up_with(project: Project, link: SuperLink, said: list[str] | None = None) -> RunningFederation:
    up = RunningFederation(project, (said if said is not None else []).append, nodes=False)
    up.processes.flwr = link  # type: ignore[method-assign,assignment]
    return up


def test_a_stop_in_the_midst_of_registering_is_made_good(project: Project) -> None:
    link = SuperLink()
    link.stop_after = 1
    with pytest.raises(KeyboardInterrupt):
        up_with(project, link).register()
    link.stop_after = 99
    up_with(project, link).register()
    noted = read_json(project.server / "registered.json")
    assert noted is not None and sorted(noted.values()) == ["100", "101", "102"] == sorted(
        link.nodes.values()
    )


def test_a_ban_reaches_a_superlink_that_was_away(project: Project) -> None:
    link, said = SuperLink(), []  # type: ignore[var-annotated]
    up = up_with(project, link, said)
    up.register()
    project.ledger().append("ban", 1, reason="norm", by="operator")
    enrol(project, 2)
    link.gone = True
    up._report()
    assert link.removed == [] and any("SuperLink unreachable; will retry" in line for line in said)
    link.gone = False
    up._report()
    assert link.removed == ["102"] and len(link.nodes) == 4  # the old key of client 2
    assert list((read_json(project.server / "suspended.json") or {}).values()) == [
        "101"
    ]  # client 1 may come back
    write_json(
        project.server / "registered.json",
        {**(read_json(project.server / "registered.json") or {}), "replaced": "102"},
    )
    up.register()  # unregistered already, and a stop came before the note
    assert (read_json(project.server / "registered.json") or {})["replaced"] == ""


def test_only_the_process_that_is_waited_for_matters(tmp_path: Path) -> None:
    processes = Processes(tmp_path / "home", tmp_path / "logs")
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        for name, code in (("node1", 0), ("proxy", 3)):
            processes.started[name] = subprocess.Popen(
                [sys.executable, "-S", "-c", f"raise SystemExit({code})"]
            )
            processes.started[name].wait()
        processes.wait_for_port(port, "superlink")
        with pytest.raises(RunError, match="proxy stopped with code 3"):
            processes.wait_for_port(port, "proxy")
        assert in_use(HOST, port) and in_use("0.0.0.0", port)
    assert not in_use(HOST, port)
    with pytest.raises(RunError, match="cannot listen on 192.0.2.1:.*federation.listen"):
        in_use("192.0.2.1", port)


def test_a_port_in_use_by_another_program_is_reported(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = RunningFederation(project, lambda line: None)
    monkeypatch.setattr(RunningFederation, "_start_superlink", lambda self: None)
    monkeypatch.setattr(up.processes, "start", lambda *_, **__: None)
    with socket.socket() as listener:
        listener.bind((HOST, project.settings.port))
        listener.listen()
        with pytest.raises(RunError, match="is in use by another program"):
            up.__enter__()


def test_stopping_is_not_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes, before = Processes(tmp_path / "home", tmp_path / "logs"), signal.getsignal(signal.SIGINT)
    process = processes.started["sleeper"] = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    )
    monkeypatch.setattr(process, "terminate", lambda: (os.kill(os.getpid(), signal.SIGINT), process.kill()))
    processes.stop()
    assert process.returncode == -signal.SIGKILL and signal.getsignal(signal.SIGINT) is before


def test_a_node_runs_once(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processes, "alive", lambda self: [17])
    with pytest.raises(RunError, match="client 1 is running already"):
        keep_node(project.node(1), lambda line: None)


def sleeper(processes: Processes) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(600)"], env=processes.environment()
    )
    processes.started["superlink"] = process
    return process


def test_of_two_ups_at_the_same_moment_one_is_refused(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes when the first has looked for processes and started none yet; it must not end those of
    the first."""
    first, second, third = (RunningFederation(project, lambda line: None, nodes=False) for _ in range(3))

    def start(self: RunningFederation) -> None:
        if self is first:
            with pytest.raises(RunError, match="this federation is running already"):
                second.__enter__()
        sleeper(self.processes)

    monkeypatch.setattr(RunningFederation, "_start_superlink", start)
    for step in ("_start_superexec", "_start_proxy", "register"):
        monkeypatch.setattr(RunningFederation, step, lambda self: None)
    with first:
        assert first.processes.started["superlink"].poll() is None
    with third:  # what was held is free again
        pass
    assert third.processes.alive() == []


def test_of_two_nodes_at_the_same_moment_one_is_refused(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, started = project.node(1), []

    def start(processes: Processes, folder: Path) -> None:
        started.append(processes)
        if len(started) == 1:
            sleeper(processes)
            monkeypatch.setattr(
                Processes, "alive", lambda self: []
            )  # as if the other had looked a moment ago
            with pytest.raises(RunError, match="client 1 is running already"):
                keep_node(folder, lambda line: None)
            assert processes.started["superlink"].poll() is None
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.deploy.node_processes.start_node", start)
    for times in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            keep_node(folder, lambda line: None)
        assert len(started) == times and started[-1].started == {}


@pytest.mark.parametrize(
    ("runs", "outcome"),
    [
        ([None, "done"], "done"),  # bad luck once
        ([None, 1, None, "done"], "done"),  # and once more, a round later
        ([None, None], "`holdfast federation up"),  # twice in a row is no luck
        ([1, None, None], "`holdfast federation resume"),
        (["a reason"], "a reason"),  # what it says itself is final
    ],
)
def test_a_run_that_ended_without_a_reason_is_started_once_more(
    runs: list[object], outcome: str, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run of Flower commits a round (its number), ends without one (None), finishes, or says why it
    stops."""
    up, left, finished = (
        RunningFederation(project, lambda line: None),
        list(runs),
        {"final": {}, "protocol": {}},
    )
    project.run.mkdir(parents=True, exist_ok=True)

    def one_run(end: float | None) -> tuple[str, str]:
        now = left.pop(0)
        if now == "done":
            write_json(project.run / "result.json", finished)
        elif isinstance(now, int):
            write_json(project.run / "head.json", {"round": now})
        elif now is not None:
            write_json(project.server / "stopped.json", {"reason": now})
        return "finished:failed", "it broke"

    monkeypatch.setattr(up, "_one_run", one_run)
    monkeypatch.setattr(up, "_report", lambda: None)
    if outcome == "done":
        assert up.run() == finished
    else:
        with pytest.raises(RunError, match=outcome):
            up.run()
    assert left == []


@pytest.mark.parametrize(("every", "started"), [(15.0, 5), (100.0, 20)])
def test_a_process_that_dies_repeatedly_is_not_restarted_for_ever(
    every: float, started: int, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SuperExec that lives for so many seconds each time, looked at twenty times."""
    clock, starts = [1000.0], []
    dead = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(1)"])
    dead.wait()
    up = RunningFederation(project, lambda line: None)
    up.processes.started["superexec"] = dead
    monkeypatch.setattr("holdfast.deploy.up.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(up, "_start_superexec", lambda: starts.append(clock[0]))
    with (
        pytest.raises(RunError, match="superexec stopped 6 times in a row, with code 1")
        if started < 20
        else nullcontext()
    ):
        for _ in range(20):
            up._restart_processes()
            clock[0] += every
    assert len(starts) == started


SHOWS_LIFE = (
    "import pathlib, sys, time\nwhile True:\n    pathlib.Path(sys.argv[1]).touch()\n    time.sleep(0.05)"
)


def test_a_process_without_a_sign_of_life_is_ended(tmp_path: Path) -> None:
    """One that hangs, one that lives, and one that never gave a sign, and so is not judged."""
    processes = Processes(tmp_path / "home", tmp_path / "logs")
    processes.freeze_limit = 1.0
    processes.sign("x").parent.mkdir(parents=True)
    for name, code in {
        "hangs": SHOWS_LIFE,
        "lives": SHOWS_LIFE,
        "mute": "import time; time.sleep(600)",
    }.items():
        processes.started[name] = subprocess.Popen(
            [sys.executable, "-S", "-c", code, str(processes.sign(name))]
        )
    try:
        end = time.monotonic() + 60
        while (
            not (processes.sign("hangs").exists() and processes.sign("lives").exists())
            and time.monotonic() < end
        ):
            time.sleep(0.01)
        processes.started["hangs"].send_signal(signal.SIGSTOP)
        while processes.started["hangs"].poll() is None and time.monotonic() < end:
            processes.end_frozen()
            time.sleep(0.05)
        assert processes.how_it_ended("hangs") == "gave no sign of life for 1 s"
        assert processes.running().keys() == {"lives", "mute"}
    finally:
        processes.stop()
    assert not processes.sign("x").parent.exists()


def test_processes_that_cannot_reach_the_server_are_reported_once(tmp_path: Path) -> None:
    said: list[str] = []
    contact, signs = (
        ServerContact(said.append),
        {f"node{client}": tmp_path / f"node{client}" for client in range(3)},
    )
    for client in (0, 2):
        away_file(signs[f"node{client}"]).touch()
    contact.report(signs)
    assert said == [], "a moment is nothing"
    for client in (0, 2):
        os.utime(away_file(signs[f"node{client}"]), (1, 1))
    for _ in range(2):
        contact.report(signs)
    assert said == ["node0, node2 cannot reach the server and will retry"]
    away_file(signs["node2"]).unlink()
    for _ in range(2):
        contact.report(signs)
    assert said[1:] == ["node2 can reach the server again"]


@pytest.mark.parametrize(
    ("free", "words"),
    [
        (
            12e6,
            (
                "the disk that holds .* is full .12 MB left.; free some space, then `holdfast "
                "federation up .* continues it .what failed: superexec stopped with code 1"
            ),
        ),
        (12e9, None),
    ],
)
def test_a_part_that_stops_on_a_full_disk(
    free: float, words: str | None, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stop names the disk, and not the sixth the part."""
    up, starts = RunningFederation(project, lambda line: None), []
    up.processes.started["superexec"] = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(1)"])
    up.processes.started["superexec"].wait()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setattr(up, "_start_superexec", lambda: starts.append(1))
    monkeypatch.setattr(up, "_run", lambda timeout: up._restart_processes())
    with pytest.raises(RunError, match=words) if words else nullcontext():
        up.run()
    assert starts == ([] if words else [1])


def test_a_node_says_what_happened_and_is_started_again(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its SuperNode is lost, then its disk is full; both are said, and it is tried again."""
    said: list[str] = []
    disk = iter([50e9, 12e6])

    def start(processes: Processes, folder: Path, name: str = "node1") -> None:
        if len(said) > 3:
            raise KeyboardInterrupt
        processes.started[name] = subprocess.Popen(
            [sys.executable, "-S", "-c", f"raise SystemExit({LOST if len(said) == 1 else 1})"]
        )

    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=next(disk)))
    monkeypatch.setattr("holdfast.deploy.node_processes.start_node", start)
    monkeypatch.setattr("holdfast.deploy.node_processes.start_again", start)
    monkeypatch.setattr(
        "holdfast.deploy.node_processes.time",
        SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: time.sleep(0.01)),
    )
    with pytest.raises(KeyboardInterrupt):
        keep_node(project.node(1), said.append)
    assert said[1] == "node1 lost its connection to the server; it is restarted in 10 s"
    assert said[2] == "node1 stopped with code 1; it is restarted in 20 s"
    assert said[3] == f"the disk that holds {project.node(1)} is full (12 MB left); free some space"


def test_a_key_that_others_can_read_is_not_used(project: Project) -> None:
    (project.node(1) / "key").chmod(0o640)
    with pytest.raises(ConfigError, match="key can be read or changed by other users.*chmod 600"):
        keep_node(project.node(1), lambda line: None)


def test_the_client_of_a_process() -> None:
    names = ("node3", "trainer12", "superexec", "superlink", "proxy")
    assert [client_of(name) for name in names] == [3, 12, None, None, None]


KILLED = """
import os, signal, sys, time
from pathlib import Path
from holdfast.deploy.processes import Processes
processes = Processes(Path(sys.argv[1]), Path(sys.argv[2]))
child = processes.start("node1", "timeit", "-n1", "-r1", "import time; time.sleep(600)", module=True)
time.sleep(1)
child.send_signal(signal.SIGSTOP)
while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":  # else it may still hear that its parent is gone
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""  # noqa: E501


def test_a_frozen_process_of_a_killed_one_is_no_hindrance(tmp_path: Path) -> None:
    """It was told to stop when its parent was killed, and cannot hear it; the next start must not take it for
    a federation that is up."""
    arguments = [str(tmp_path / "home"), str(tmp_path / "logs")]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments], cwd=Path(__file__).parents[2], timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    processes = Processes(tmp_path / "home", tmp_path / "logs")
    assert processes.alive()
    try:
        processes.claim("it is up already")
        assert processes.alive() == []
    finally:
        processes.stop()
