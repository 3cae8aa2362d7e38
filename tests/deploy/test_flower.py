"""Flower's programs with more patience: settings and functions of Flower's own, which a new Flower may move,
so each is looked at there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.corestate import CoreState
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.superlink.federation import NoOpFederationManager
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from holdfast.deploy.flower import accept_twice, retry_for_ever
from holdfast.deploy.object_children import let_the_server_correct
from holdfast.deploy.processes import LOST
from holdfast.deploy.proxy_limits import Limits

DATABASE = """
from holdfast.deploy.flower import wait_for_the_database
wait_for_the_database()
from flwr.supercore.sql_mixin import _set_sqlite_pragmas
import sqlite3
connection = sqlite3.connect(":memory:")
_set_sqlite_pragmas(connection, None)
print(connection.execute("PRAGMA busy_timeout").fetchone()[0], connection.execute("PRAGMA foreign_keys").fetchone()[0])
"""  # noqa: E501

CONNECTIONS = """
import sys, uvicorn
from holdfast.deploy.flower import keep_connections
keep_connections()
async def app(*_): pass
seen = []
class Server(uvicorn.Server):
    def run(self, sockets=None):
        seen.append(self.config.timeout_keep_alive)
        self.started = True
sys.modules["uvicorn.main"].Server = Server
uvicorn.run(app, port=1)
print(uvicorn.Config(app).timeout_keep_alive, uvicorn.Config(app, timeout_keep_alive=300).timeout_keep_alive, *seen)
"""  # noqa: E501


def said(code: str) -> list[str]:
    """In a process of its own: Flower reads some settings when it is imported, and the others are for the
    whole process."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_locked_database_is_waited_for() -> None:
    assert said(DATABASE) == ["60000", "1"]


def test_idle_connections_outlive_the_senders() -> None:
    """However the server is started; a longer time that somebody asks for stays."""
    assert said(CONNECTIONS) == [str(int(Limits.idle)), "300", str(int(Limits.idle))]


def store(kind: str, folder: Path) -> CoreState:
    database = str(folder / "state.db") if kind == "sql" else ":flwr-in-memory:"
    objects = ObjectStoreFactory(database).store()
    if kind == "node":
        states: type = InMemoryNodeState
        made = (objects,)
    else:
        states = SqlLinkState if kind == "sql" else InMemoryLinkState
        made = (
            (database, NoOpFederationManager(), objects)
            if kind == "sql"
            else (NoOpFederationManager(), objects)
        )  # type: ignore[assignment]
    patient = type("Patient", (states,), {})  # the change is this test's alone
    accept_twice(patient)
    state: CoreState = patient(*made)
    if kind == "sql":
        state.initialize()  # type: ignore[attr-defined]
    return state


@pytest.mark.parametrize("kind", ["sql", "memory", "node"])
def test_an_object_that_is_stored_already_may_be_sent_again(kind: str, tmp_path: Path) -> None:
    """A receipt was lost, so the sender sends once more; Flower refuses that, and the whole run ended."""
    state = store(kind, tmp_path)
    letter = RecordDict({"a": ConfigRecord({"x": 1}), "b": ConfigRecord({"x": 2})})
    contents = {name: part.deflate() for name, part in get_all_nested_objects(letter).items()}
    session = state.start_session(1)
    assert set(state.preregister_object_tree(get_object_tree(letter), session)) == set(contents)
    first, *others = contents
    assert state.store_object(1, session, first, contents[first])
    assert state.store_object(1, session, first, contents[first]), "while the rest is still to come"
    for name in others:
        assert state.store_object(1, session, name, contents[name])
    assert state.store_object(1, session, others[-1], contents[others[-1]]), (
        "after the last, when the session has ended"
    )
    assert {name: state.get_object(1, name) for name in contents} == contents


@pytest.mark.parametrize("kind", ["sql", "memory", "node"])
def test_other_objects_are_still_refused(kind: str, tmp_path: Path) -> None:
    state = store(kind, tmp_path)
    letter, other = RecordDict({"a": ConfigRecord({"x": 1})}), RecordDict({"a": ConfigRecord({"x": 2})})
    contents = {name: part.deflate() for name, part in get_all_nested_objects(letter).items()}
    session = state.start_session(1)
    state.preregister_object_tree(get_object_tree(letter), session)
    first = next(iter(contents))
    assert not state.store_object(1, session, first, b"something else"), (
        "its content is not what its name says"
    )
    assert not state.store_object(1, session, other.object_id, other.deflate()), "nobody announced it"
    assert not state.store_object(1, "no such session", first, contents[first]), (
        "announced, but not by this sender, and not there yet"
    )
    assert state.store_object(1, session, first, contents[first])
    assert not state.store_object(1, session, first, b"something else")


RETURNS = """
import threading, time
from flwr.supernode import cli
cli.flower_supernode = lambda: threading.Thread(target=time.sleep, args=(100,)).start()  # as its uvicorn, which nobody stops
from holdfast.deploy import flower
flower.supernode()
"""  # noqa: E501

HEARTBEAT = """
import time
import httpx
from holdfast.deploy.flower import Heartbeat
codes = [500, 502, 413]
def beat():
    reply = httpx.Response(codes.pop(0), request=httpx.Request("POST", "https://server"))
    reply.raise_for_status()
Heartbeat(beat).start()
time.sleep(100)
"""


@pytest.mark.parametrize("code", [RETURNS, HEARTBEAT], ids=["connection", "heartbeat"])
def test_a_supernode_that_is_lost_ends(code: str) -> None:
    """Its connection is over, or its heartbeat has died alone: else the process would stay, and nobody would
    start it again."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == LOST and "this node exits" in done.stderr, done.stderr


def test_a_tls_error_ends_nothing_once_the_server_was_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_ALIVE", str(tmp_path / "node1"))
    invoker = retry_for_ever(make_simple_http_retry_invoker)()
    invoker.jitter, left, away = lambda _: 0.0, [], []  # type: ignore[var-annotated]

    def call() -> str:
        away.append((tmp_path / "node1.away").exists())
        if left:
            raise httpx.ConnectError(left.pop())
        return "reached"

    tls = "[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol (_ssl.c:1006)"
    left[:] = [tls]
    with pytest.raises(httpx.ConnectError):  # never reached: it may be the wrong server
        invoker.invoke(call)
    assert invoker.invoke(call) == "reached"
    left[:] = [tls, "_ssl.c:989: The handshake operation timed out", "certificate verify failed"]
    assert invoker.invoke(call) == "reached"
    assert away == [False, False, False, True, True, True] and not (tmp_path / "node1.away").exists()


LAUNCH = """
import os
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec
from holdfast.deploy.flower import start_apps_safely
start_apps_safely()
for kind in (TaskType.CLIENT_APP, TaskType.SERVER_APP):
    SubprocessExecutor().launch(ExecutionSpec(kind, "127.0.0.1:1", "ab" * 32, False, "ca.pem", False, None, False, 7))
for _ in range(2):
    os.wait()
"""  # noqa: E501

APP = """#!{python}
import argparse, sys
from flwr.common.args import add_args_flwr_app_common, try_obtain_flwr_app_token
parser = argparse.ArgumentParser()
parser.add_argument("--runtime-api-address")
add_args_flwr_app_common(parser)
given = parser.parse_args()
with open(__file__ + ".txt", "w") as file:
    print(*sys.argv[1:], "got", try_obtain_flwr_app_token(given), file=file)
"""


def test_a_token_is_not_in_the_process_list(tmp_path: Path) -> None:
    """Read as Flower's own apps read it."""
    apps = [tmp_path / "flwr-clientapp", tmp_path / "flwr-serverapp"]
    for app in apps:
        app.write_text(APP.format(python=sys.executable))
        app.chmod(0o700)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PATH", "")])
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", LAUNCH], cwd=root, env={**os.environ, "PATH": path}, check=True, timeout=120
    )
    end = time.monotonic() + 60
    written = [app.with_name(app.name + ".txt") for app in apps]
    while not all(file.exists() and file.read_text() for file in written) and time.monotonic() < end:
        time.sleep(0.05)
    for file in written:
        arguments, token = file.read_text().split(" got ")
        assert (
            token.strip() == "ab" * 32
            and "ab" * 32 not in arguments
            and "--root-certificates ca.pem" in arguments
        )


ENDED = """
import os, signal
from holdfast.deploy.flower import start_apps_safely
from flwr.supercore.superexec.executor import subprocess_executor
start_apps_safely()
for app in ("flwr-clientapp", "flwr-serverapp"):
    subprocess_executor.subprocess.Popen([app, "--token", "x"])
while not all(os.path.exists(os.path.join({folder!r}, app + ".pid")) for app in ("flwr-clientapp", "flwr-serverapp")):
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""  # noqa: E501


def test_a_client_app_ends_with_the_superexec_that_started_it(tmp_path: Path) -> None:
    """A ServerApp goes on: it only needs the SuperLink."""
    for name in ("flwr-clientapp", "flwr-serverapp"):
        script = (
            f"#!/bin/sh\necho $$ > {tmp_path}/{name}.writing\nmv {tmp_path}/{name}.writing"
            f" {tmp_path}/{name}.pid\nexec sleep 60\n"
        )
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o700)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PATH", "")])
    killed = subprocess.run(
        [sys.executable, "-c", ENDED.format(folder=str(tmp_path))],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PATH": path},
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL
    client, server = (
        int((tmp_path / f"{name}.pid").read_text()) for name in ("flwr-clientapp", "flwr-serverapp")
    )
    try:
        end = time.monotonic() + 30
        while sleeps(client) and time.monotonic() < end:
            time.sleep(0.05)
        assert not sleeps(client) and sleeps(server)
    finally:
        os.kill(server, signal.SIGKILL)


def sleeps(pid: int) -> bool:
    """Whether the process lives; one that waits for its parent to ask how it ended does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def parts(whole: ObjectTree) -> dict[str, set[str]]:
    return {
        node.object_id: {child.object_id for child in node.children} for node in iterate_object_tree(whole)
    }


def tree(name: str, *children: ObjectTree) -> ObjectTree:
    return ObjectTree(object_id=name, children=children)


@pytest.mark.parametrize("pushed", [False, True])
def test_a_false_claim_about_the_servers_objects_does_not_stop_the_server(
    pushed: bool, tmp_path: Path
) -> None:
    """A node announces a record that the server is about to send, which is the same in every round, with a
    child that it does not have; with or without its content. Flower then refuses the server's order, and the
    run ends. What a node announces after the server is refused: it could take the parts of an order away that
    other nodes have not pulled yet."""
    stores = type("Store", (SqlObjectStore,), {})  # the change is this test's alone
    server = SimpleNamespace(push_messages=lambda tree: objects.preregister(1, tree))
    let_the_server_correct(stores, server)
    objects = stores(str(tmp_path / "state.db"))
    objects.initialize()
    order = RecordDict(
        {
            "bank": ArrayRecord({"bank": Array(np.zeros(3))}),
            "extra": ArrayRecord({}),
            "header": ConfigRecord({"round": 1}),
        }
    )
    record, bank, other = order["extra"], order["bank"], "1" * 64
    content = {name: part.deflate() for name, part in get_all_nested_objects(order).items()}
    objects.preregister(
        1, tree("2" * 64, tree(record.object_id, tree(other)), tree(bank.object_id))
    )  # two lies
    if pushed:
        objects.put(record.object_id, content[record.object_id])
    missing = server.push_messages(get_object_tree(order))
    assert set(missing) == set(content) - ({record.object_id} if pushed else set())
    for lie in (tree(record.object_id, tree(other)), tree(bank.object_id)):  # the content is on its way
        with pytest.raises(ValueError, match="different children"):
            objects.preregister(1, lie)
    for name in missing:
        objects.put(name, content[name])
    assert parts(objects.get_object_tree(order.object_id)) == parts(get_object_tree(order))
    objects.delete(order.object_id)
    assert objects.get(order.object_id) is None
