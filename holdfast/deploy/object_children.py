"""Protects Flower's store of objects from a node that announces an object of the server with false children.

An object's id is the digest of its content, but its children are those of its first announcement, and a later
announcement with others is refused. Some ids are known beforehand (an empty record always has the same, and a
model that was measured is trained on next), so a node could announce one of them wrongly; then the server's
next order would be refused and the run would stop. With this change the server, and only the server, corrects
earlier announcements of its objects. A later announcement by a node is refused, as in Flower.

Needed for flwr 1.41 (SqlObjectStore.preregister, and the handler of the ServerApp's messages). Its test is
test_a_false_claim_about_the_servers_objects_does_not_stop_the_server in tests/deploy/test_flower.py."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.state.schema.objectstore_models import ObjectChild, StoredObject
from sqlalchemy import delete, insert, select, update

_MESSAGE = "preregistered with different"
_OF_THE_SERVER: ContextVar[bool] = ContextVar("of_the_server", default=False)


def let_the_server_correct(stores: type, handlers: Any) -> None:
    """Change the class of stores, and `handlers`, the module that answers the ServerApp."""
    usual, push = stores.preregister, handlers.push_messages  # type: ignore[attr-defined]

    def preregister(self: Any, run_id: int, object_tree: Any) -> list[str]:
        try:
            return list(usual(self, run_id, object_tree))
        except ValueError as error:
            if _MESSAGE not in str(error) or not _OF_THE_SERVER.get():
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
