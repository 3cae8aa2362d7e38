"""The changes to Flower's programs. Each has a test that Flower of the version named here needs it, and one
that it works; a new Flower that moves what is changed fails both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import uvicorn

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.constant import SQLITE_PRAGMAS
from flwr.supercore.corestate import CoreState
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.version import package_version
from flwr.superlink.federation import NoOpFederationManager

from holdfast.deploy.flower_patches import (
    FLOWER,
    accept_twice,
    clean_up_seldom,
    let_the_server_correct,
)
from holdfast.deploy.proxy_limits import Limits

DATABASE = """
from holdfast.deploy.flower_patches import wait_for_the_database
wait_for_the_database()
from flwr.supercore.sql_mixin import _set_sqlite_pragmas
import sqlite3
connection = sqlite3.connect(":memory:")
_set_sqlite_pragmas(connection, None)
print(connection.execute("PRAGMA busy_timeout").fetchone()[0], connection.execute("PRAGMA foreign_keys").fetchone()[0])
"""  # noqa: E501

CONNECTIONS = """
import sys, uvicorn
from holdfast.deploy.flower_patches import keep_connections
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


def test_the_changes_are_for_the_flower_that_is_installed() -> None:
    """Another one needs a look at each of them: then FLOWER in flower_patches.py is set to it."""
    assert package_version.startswith(f"{FLOWER}.")


def test_a_locked_database_is_waited_for() -> None:
    assert said(DATABASE) == ["60000", "1"]
    assert dict(SQLITE_PRAGMAS)["busy_timeout"] == "5000", "Flower waits as long: it is not needed"


def test_idle_connections_outlive_the_senders() -> None:
    """However the server is started; a longer time that somebody asks for stays."""
    assert uvicorn.Config(lambda *_: None).timeout_keep_alive == 5, "uvicorn waits as long: it is not needed"
    assert said(CONNECTIONS) == [str(int(Limits.idle)), "300", str(int(Limits.idle))]


def store(kind: str, folder: Path, patched: bool = True) -> CoreState:
    database = str(folder / "state.db") if kind == "sql" else ":flwr-in-memory:"
    objects, manager = ObjectStoreFactory(database).store(), NoOpFederationManager()
    states: type = SqlLinkState if kind == "sql" else InMemoryLinkState
    patient = type("Patient", (states,), {})  # the change is this test's alone
    if patched:
        accept_twice(patient)
    made = (database, manager, objects) if kind == "sql" else (manager, objects)
    state: CoreState = patient(*made)
    if kind == "sql":
        state.initialize()  # type: ignore[attr-defined]
    return state


@pytest.mark.parametrize("kind", ["sql", "memory"])
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


@pytest.mark.parametrize("kind", ["sql", "memory"])
def test_flower_itself_refuses_what_is_sent_again(kind: str, tmp_path: Path) -> None:
    state, letter = store(kind, tmp_path, patched=False), RecordDict({"a": ConfigRecord({"x": 1})})
    contents = {name: part.deflate() for name, part in get_all_nested_objects(letter).items()}
    session, first = state.start_session(1), next(iter(contents))
    state.preregister_object_tree(get_object_tree(letter), session)
    assert state.store_object(1, session, first, contents[first])
    assert not state.store_object(1, session, first, contents[first]), "accept_twice is not needed"


@pytest.mark.parametrize("kind", ["sql", "memory"])
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


LAUNCH = """
import os
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec
from holdfast.deploy.flower_patches import hide_tokens
hide_tokens()
kind = TaskType.SERVER_APP
spec = ExecutionSpec(kind, "127.0.0.1:1", "ab" * 32, False, "ca.pem", False, None, False, 7)
SubprocessExecutor().launch(spec)
os.wait()
"""

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
    app = tmp_path / "flwr-serverapp"
    app.write_text(APP.format(python=sys.executable))
    app.chmod(0o700)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PATH", "")])
    for code, hidden in ((LAUNCH.replace("\nhide_tokens()", ""), False), (LAUNCH, True)):
        environment = {**os.environ, "PATH": path}
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[2],
            env=environment,
            check=True,
            timeout=120,
        )
        arguments, token = app.with_name(app.name + ".txt").read_text().split(" got ")
        assert token.strip() == "ab" * 32 and "--root-certificates ca.pem" in arguments
        assert ("ab" * 32 not in arguments) == hidden, "Flower hides it itself: hide_tokens is not needed"


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
    objects, plain = stores(str(tmp_path / "state.db")), SqlObjectStore(str(tmp_path / "plain.db"))
    objects.initialize()
    plain.initialize()
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
    plain.preregister(1, tree("2" * 64, tree(record.object_id, tree(other))))
    with pytest.raises(ValueError, match="different children"):  # else let_the_server_correct is not needed
        plain.preregister(1, get_object_tree(order))
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


def test_tasks_whose_process_has_died_are_looked_for_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower does so in every request, and each time writes to the database."""
    looked: list[str] = []
    clock = [100.0]
    monkeypatch.setattr("holdfast.deploy.flower_patches.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(
        SqlLinkState, "_cleanup_expired_task_tokens", lambda self: looked.append(type(self).__name__)
    )
    for patched in (False, True):
        seldom = type("Seldom" if patched else "Often", (SqlLinkState,), {})
        if patched:
            clean_up_seldom(seldom)
        state = seldom(
            str(tmp_path / "state.db"),
            NoOpFederationManager(),
            ObjectStoreFactory(str(tmp_path / "state.db")).store(),
        )
        state.initialize()
        for now in (100.0, 100.5, 100.9, 101.1):
            clock[0] = now
            state.get_run_status({7})
    assert looked == ["Often"] * 4 + ["Seldom"] * 2
