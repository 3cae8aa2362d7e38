"""The processes of one client: a SuperNode, which talks to the server; a SuperExec, which starts the
ClientApp for each message; and the trainer that does the work.

SuperNode and SuperExec talk over 127.0.0.1, where every user of the machine can connect. So the SuperNode has
a certificate and requires a secret for a task. Both are made anew whenever it starts, in NODE/runtime, which
only the node's owner can read."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.core.errors import ConfigError
from holdfast.deploy.disk import naming_a_full_disk, shortage
from holdfast.deploy.heartbeat import ServerContact
from holdfast.deploy.keys import make_authority, make_secret, make_server_certificate
from holdfast.deploy.pending_key import take_other_key, was_refused
from holdfast.deploy.processes import HOST, Processes, free_port, options
from holdfast.deploy.project import open_node
from holdfast.deploy.server_memory import ServerMemory
from holdfast.deploy.sockets import socket_of

Say = Callable[[str], None]
_FLOWER = "holdfast.deploy.flower"


def client_of(name: str) -> int | None:
    """Return the client of a process; None for the server's own."""
    number = name.removeprefix("node").removeprefix("trainer").removeprefix("superexec")
    return int(number) if number.isdigit() else None


def start_node(processes: Processes, folder: Path) -> None:
    """Start all processes of one client, from its folder alone."""
    node = open_node(folder)
    if node.resident:
        start_again(processes, folder, f"trainer{node.client}")
    start_again(processes, folder, f"node{node.client}")


def start_again(processes: Processes, folder: Path, name: str) -> None:
    """Start one of the processes of a client. SuperNode and SuperExec are restarted together: a new SuperNode
    has another port and secret, and one whose SuperExec ended during a message waits for its answer for
    ever."""
    if name.startswith("trainer"):
        processes.start(name, "holdfast.deploy.trainer", "--socket", str(socket_of(folder)), module=True)
        return
    supernode, superexec = f"node{client_of(name)}", f"superexec{client_of(name)}"
    processes.end(superexec if name == supernode else supernode)
    _make_secrets(folder / "runtime")
    _start_supernode(processes, folder, supernode)
    _start_superexec(processes, folder, supernode)


def _make_secrets(runtime: Path) -> None:
    shutil.rmtree(runtime, ignore_errors=True)
    runtime.mkdir(mode=0o700)
    make_authority(runtime, "node")
    make_server_certificate(runtime, [])
    (runtime / "ca.key").unlink()  # it is not needed again
    make_secret(runtime / "superexec.secret")


def _start_supernode(processes: Processes, folder: Path, name: str) -> None:
    node, runtime = open_node(folder), folder / "runtime"
    where = {
        "state-dir": str((folder / node.state).absolute()),
        "config": str((folder / node.experiment).absolute()),
        "home": str(folder.absolute()),
        "key": str((folder / "key").absolute()),
        "server-key": str((folder / "server.pub").absolute()),
    }
    if node.resident:
        where["trainer"] = str(socket_of(folder))
    settings = " ".join(
        [f"client-id={node.client}", *(f"{name}={json.dumps(value)}" for name, value in where.items())]
    )
    port = processes.ports[name] = free_port()
    processes.start(
        name,
        _FLOWER,
        "supernode",
        *options(
            superlink=node.superlink,
            root_certificates=folder / "ca.pem",
            auth_supernode_private_key=folder / "key",
            host=HOST,
            port=port,
            node_config=settings,
            isolation="process",
            superexec_auth_secret_file=runtime / "superexec.secret",
            ssl_ca_certfile=runtime / "ca.pem",
            ssl_certfile=runtime / "server.pem",
            ssl_keyfile=runtime / "server.key",
        ),
        module=True,
    )


def _start_superexec(processes: Processes, folder: Path, supernode: str) -> None:
    """Start the SuperExec, whose child is the ClientApp, with the environment of the SuperNode."""
    name, runtime = f"superexec{client_of(supernode)}", folder / "runtime"
    processes.extra[name] = processes.extra.get(supernode, {})
    processes.start(
        name,
        _FLOWER,
        "superexec",
        *options(
            runtime_api_address=f"{HOST}:{processes.ports[supernode]}",
            root_certificates=runtime / "ca.pem",
            superexec_auth_secret_file=runtime / "superexec.secret",
        ),
        module=True,
    )


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
