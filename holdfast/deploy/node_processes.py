"""The processes of one client: one that talks to the server (supernode.py), and the trainer that does the
work. Both are forks of one process that has torch and Flower in memory (forks.py); they listen on no port."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.core.errors import ConfigError
from holdfast.deploy.disk import naming_a_full_disk, shortage
from holdfast.deploy.heartbeat import ServerContact
from holdfast.deploy.pending_key import take_other_key, was_refused
from holdfast.deploy.processes import Processes, options
from holdfast.deploy.project import open_node
from holdfast.deploy.server_memory import ServerMemory
from holdfast.deploy.sockets import socket_of

Say = Callable[[str], None]


def client_of(name: str) -> int | None:
    """Return the client of a process; None for the server's own."""
    number = name.removeprefix("node").removeprefix("trainer")
    return int(number) if number.isdigit() else None


def start_node(processes: Processes, folder: Path) -> None:
    """Start all processes of one client, from its folder alone."""
    node = open_node(folder)
    if node.resident:
        start_again(processes, folder, f"trainer{node.client}")
    start_again(processes, folder, f"node{node.client}")


def start_again(processes: Processes, folder: Path, name: str) -> None:
    """Start one of the processes of a client."""
    if name.startswith("trainer"):
        processes.fork(name, "holdfast.deploy.trainer", "--socket", str(socket_of(folder)))
        return
    node = open_node(folder)
    settings: dict[str, object] = {
        "client-id": node.client,
        "state-dir": str((folder / node.state).absolute()),
        "config": str((folder / node.experiment).absolute()),
        "home": str(folder.absolute()),
        "key": str((folder / "key").absolute()),
        "server-key": str((folder / "server.pub").absolute()),
    }
    if node.resident:
        settings["trainer"] = str(socket_of(folder))
    where = options(superlink=node.superlink, authority=folder / "ca.pem", settings=json.dumps(settings))
    processes.fork(name, "holdfast.deploy.supernode", *where)


def keep_node(folder: Path, say: Say) -> None:
    """Run one client on its own machine until it is interrupted. For a minute after a crash Flower still
    considers the node connected and refuses it, so it is tried again."""
    node = open_node(folder)
    _check_key(folder / "key")
    processes = Processes(folder / "flower", folder / "logs")
    with naming_a_full_disk(folder, lambda: "start the node again"):
        processes.claim(f"client {node.client} is running already: another process uses {folder}")
    log = processes.logs / f"node{node.client}.log"
    say(f"client {node.client} joins {node.superlink}; its log is {log}")
    printed = _size(log)
    contact, pause, told = ServerContact(say), 5.0, _Refusal(folder / node.state, say)
    try:
        with naming_a_full_disk(folder, lambda: "start the node again"):
            start_node(processes, folder)
        while True:
            began = time.monotonic()
            name = _first_to_stop(processes, contact, told)
            pause = 5.0 if time.monotonic() - began > 120 else min(2 * pause, 60.0)
            say(f"{name} {processes.how_it_ended(name)}; it is restarted in {pause:g} s")
            if full := shortage(folder):
                say(full)
            time.sleep(pause)
            if was_refused(log, printed) and take_other_key(folder, node.client):
                say("the server does not take the key of this node (any more): the other one is tried")
            printed = _size(log)
            _try_to_start(processes, folder, name, say)
    finally:
        processes.stop()


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _check_key(key: Path) -> None:
    if key.exists() and key.stat().st_mode & 0o077:
        raise ConfigError(
            f"{key} can be read or changed by other users, who could pose as this client; `chmod 600 {key}`,"
            " or enrol a new key"
        )


def _try_to_start(processes: Processes, folder: Path, name: str, say: Say) -> None:
    """Restart a process; if the disk is full, the caller tries again as after any other stop."""
    try:
        start_again(processes, folder, name)
    except OSError as error:
        say(f"{name} could not be started: {error}")


class _Refusal:
    """Reports once that this node refuses its server."""

    def __init__(self, state: Path, say: Say):
        self.memory, self.say, self.told = ServerMemory(state), say, ""

    def report(self) -> None:
        why = self.memory.refused()
        if why and why != self.told:
            self.say(why)
        self.told = why


def _first_to_stop(processes: Processes, contact: ServerContact, refusal: _Refusal) -> str:
    while True:
        processes.end_frozen()
        contact.report(processes.running())
        refusal.report()
        for name, process in processes.started.items():
            if process.poll() is not None:
                return name
        time.sleep(1)
