"""All changes to Flower's own programs, for the flwr that FLOWER names. For each, a test in
tests/deploy/test_flower_patches.py fails when Flower no longer needs it or has moved what it changes.

    wait_for_the_database        a reply is lost if the database is locked for 5 seconds
    keep_connections             server and sender both drop a connection that was idle for 5 seconds, so a
                                 request may meet a closing connection and its receipt is lost
    accept_twice                 an object that is sent again because its receipt was lost is refused, which
                                 ends the run
    let_the_server_correct       a node can announce an object of the server with false children, so that the
                                 server's next order is refused
    clean_up_seldom              every object that is sent or fetched first writes to the database, in search
                                 of tasks whose process has died
    hide_tokens                  the token of a task, which is all that one needs to read a model and to
                                 answer, is in the process list

Nodes run no program of Flower's (supernode.py)."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import uvicorn
from flwr.supercore import constant
from flwr.supercore.inflatable.inflatable_object import get_object_id, iterate_object_tree
from flwr.supercore.state.schema.objectstore_models import ObjectChild, StoredObject
from sqlalchemy import delete, insert, select, update

from holdfast.deploy.proxy_limits import Limits

FLOWER = "1.41"
DATABASE_TIMEOUT = 60_000
"""Milliseconds to wait for the database: as long as Flower waits for a sign of life."""
_SELDOM = 1.0  # seconds between two clean-ups
_DIFFERENT = "preregistered with different"  # in Flower's error
_OF_THE_SERVER: ContextVar[bool] = ContextVar("of_the_server", default=False)


def wait_for_the_database() -> None:
    """Wait longer for a locked database. Call it before Flower reads the setting."""
    usual = getattr(constant, "SQLITE_PRAGMAS", ())
    patient = tuple(
        (name, str(DATABASE_TIMEOUT) if name == "busy_timeout" else value) for name, value in usual
    )
    vars(constant)["SQLITE_PRAGMAS"] = patient


def keep_connections() -> None:
    """Keep idle connections open for as long as the proxy does."""
    usual = uvicorn.Config.__init__

    def init(self: uvicorn.Config, *arguments: Any, **settings: Any) -> None:
        usual(self, *arguments, **settings)
        self.timeout_keep_alive = max(self.timeout_keep_alive, int(Limits.idle))

    vars(uvicorn)["Config"].__init__ = init


def accept_twice(states: type) -> None:
    """Report success when an object that is in the store already is sent again. Its id is the digest of its
    content, so a sender without the content learns nothing."""
    usual = states.store_object  # type: ignore[attr-defined]

    def store_object(self: Any, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        if usual(self, run_id, session_id, object_id, object_content):
            return True
        return (
            get_object_id(object_content) == object_id and self.object_store.get(object_id) == object_content
        )

    states.store_object = store_object  # type: ignore[attr-defined]


def let_the_server_correct(stores: type, handlers: Any) -> None:
    """Let the server, and only the server, correct earlier announcements of its objects. `stores` is the
    class of stores, `handlers` the module that answers the ServerApp.

    An object's id is the digest of its content, but its children are those of its first announcement, and a
    later announcement with others is refused. Some ids are known beforehand: an empty record always has the
    same, and a model that was measured is trained on next."""
    usual, push = stores.preregister, handlers.push_messages  # type: ignore[attr-defined]

    def preregister(self: Any, run_id: int, object_tree: Any) -> list[str]:
        try:
            return list(usual(self, run_id, object_tree))
        except ValueError as error:
            if _DIFFERENT not in str(error) or not _OF_THE_SERVER.get():
                raise
        with self._mutation_session() as session:
            for node in iterate_object_tree(object_tree):  # children come first
                claimed = [child.object_id for child in node.children]
                if _differs(session, node.object_id, claimed):
                    for child in node.children:
                        usual(self, run_id, child)
                    _correct(session, node.object_id, claimed)
            return list(usual(self, run_id, object_tree))

    def push_messages(*args: Any, **options: Any) -> Any:
        token = _OF_THE_SERVER.set(True)
        try:
            return push(*args, **options)
        finally:
            _OF_THE_SERVER.reset(token)

    stores.preregister = preregister  # type: ignore[attr-defined]
    handlers.push_messages = push_messages


def _children(session: Any, name: str) -> set[str]:
    return set(session.scalars(select(ObjectChild.child_id).where(ObjectChild.parent_id == name)))


def _differs(session: Any, name: str, claimed: list[str]) -> bool:
    known = session.scalar(select(StoredObject.object_id).where(StoredObject.object_id == name)) is not None
    return known and _children(session, name) != set(claimed)


def _correct(session: Any, name: str, claimed: list[str]) -> None:
    before = _children(session, name)
    session.execute(delete(ObjectChild).where(ObjectChild.parent_id == name))
    fewer = update(StoredObject).where(StoredObject.object_id.in_(before), StoredObject.ref_count > 0)
    session.execute(fewer.values(ref_count=StoredObject.ref_count - 1))
    for child in dict.fromkeys(claimed):
        session.execute(insert(ObjectChild).values(parent_id=name, child_id=child))
        more = update(StoredObject).where(StoredObject.object_id == child)
        session.execute(more.values(ref_count=StoredObject.ref_count + 1))


def clean_up_seldom(states: type) -> None:
    """Look for tasks whose process has died once a second, and not in every request: a request that only
    reads need not wait for those that write."""
    usual = states._cleanup_expired_task_tokens  # type: ignore[attr-defined]

    def clean_up(self: Any) -> None:
        now = time.monotonic()
        if now - vars(self).get("_cleaned_up", -_SELDOM) >= _SELDOM:
            self._cleaned_up = now
            usual(self)

    states._cleanup_expired_task_tokens = clean_up  # type: ignore[attr-defined]


def hide_tokens() -> None:
    """Pass the token of a task to its process as standard input, from a file without a name, and not in the
    process list, which every user of the machine can read."""
    from flwr.supercore.superexec.executor import subprocess_executor

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        place = command.index("--token")
        with (
            open(os.memfd_create("token"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()
        ) as file:
            file.write(command[place + 1].encode())
            file.flush()
            hidden = [*command[:place], "--token-file", "/dev/stdin", *command[place + 2 :]]
            return subprocess.Popen(hidden, stdin=file, **options)

    vars(subprocess_executor)["subprocess"] = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)
