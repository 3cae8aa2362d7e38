"""Flower's programs with more patience: settings and functions of Flower's own, which a new Flower may move, so each is looked at there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from flwr.app import ConfigRecord, RecordDict
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.corestate import CoreState
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from holdfast.deploy.flower import accept_twice
from holdfast.deploy.proxy import IDLE

DATABASE = """
from holdfast.deploy.flower import wait_for_the_database
wait_for_the_database()
from flwr.supercore.sql_mixin import _set_sqlite_pragmas
import sqlite3
connection = sqlite3.connect(":memory:")
_set_sqlite_pragmas(connection, None)
print(connection.execute("PRAGMA busy_timeout").fetchone()[0], connection.execute("PRAGMA foreign_keys").fetchone()[0])
"""

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
"""


def said(code: str) -> list[str]:
    """In a process of its own: Flower reads some settings when it is imported, and the others are for the whole process."""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_its_database_is_waited_for() -> None:
    assert said(DATABASE) == ["60000", "1"]


def test_its_connections_outlive_the_senders() -> None:
    """However the server is started; a longer time that somebody asks for stays."""
    assert said(CONNECTIONS) == [str(IDLE), "300", str(IDLE)]


def store(kind: str, folder: Path) -> CoreState:
    database = str(folder / "state.db") if kind == "sql" else ":flwr-in-memory:"
    objects = ObjectStoreFactory(database).store()
    if kind == "node":
        states: type = InMemoryNodeState
        made = (objects,)
    else:
        states = SqlLinkState if kind == "sql" else InMemoryLinkState
        made = (database, NoOpFederationManager(), objects) if kind == "sql" else (NoOpFederationManager(), objects)  # type: ignore[assignment]
    patient = type("Patient", (states,), {})  # the change is this test's alone
    accept_twice(patient)
    state: CoreState = patient(*made)
    if kind == "sql":
        state.initialize()  # type: ignore[attr-defined]
    return state


@pytest.mark.parametrize("kind", ["sql", "memory", "node"])
def test_what_is_there_already_may_be_sent_again(kind: str, tmp_path: Path) -> None:
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
    assert state.store_object(1, session, others[-1], contents[others[-1]]), "after the last, when the session has ended"
    assert {name: state.get_object(1, name) for name in contents} == contents


@pytest.mark.parametrize("kind", ["sql", "memory", "node"])
def test_nothing_else_is_let_in(kind: str, tmp_path: Path) -> None:
    state = store(kind, tmp_path)
    letter, other = RecordDict({"a": ConfigRecord({"x": 1})}), RecordDict({"a": ConfigRecord({"x": 2})})
    contents = {name: part.deflate() for name, part in get_all_nested_objects(letter).items()}
    session = state.start_session(1)
    state.preregister_object_tree(get_object_tree(letter), session)
    first = next(iter(contents))
    assert not state.store_object(1, session, first, b"something else"), "its content is not what its name says"
    assert not state.store_object(1, session, other.object_id, other.deflate()), "nobody announced it"
    assert not state.store_object(1, "no such session", first, contents[first]), "announced, but not by this sender, and not there yet"
    assert state.store_object(1, session, first, contents[first])
    assert not state.store_object(1, session, first, b"something else")
