"""Flower's SuperLink and SuperNode, made to bear a busy machine.

    python -m holdfast.deploy.flower superlink ...        the options of flower-superlink
    python -m holdfast.deploy.flower supernode ...        the options of flower-supernode

What goes wrong without this, on two busy cores:
- a reply that finds the database locked for 5 seconds is lost;
- what is sent again because its receipt was lost is refused, since it is there already, and that ended a whole run;
- receipts are lost more often than need be: server and sender both drop a connection that has been idle for 5 seconds, so that a request
  may meet a closing one.

A Flower that keeps one of these elsewhere goes on as it is."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from flwr.supercore import constant
from flwr.supercore.inflatable.inflatable_object import get_object_id

from holdfast.deploy.proxy import IDLE

PATIENCE = 60_000
"""Milliseconds for the database: as long as Flower waits for a sign of life."""


def wait_for_the_database() -> None:
    """Before anything has read the setting."""
    usual = getattr(constant, "SQLITE_PRAGMAS", ())
    patient = tuple((name, str(PATIENCE) if name == "busy_timeout" else value) for name, value in usual)
    vars(constant)["SQLITE_PRAGMAS"] = patient


def keep_connections() -> None:
    """For as long as the proxy keeps them."""
    usual = uvicorn.Config.__init__

    def init(self: uvicorn.Config, *arguments: Any, **settings: Any) -> None:
        usual(self, *arguments, **settings)
        self.timeout_keep_alive = max(self.timeout_keep_alive, IDLE)

    vars(uvicorn)["Config"].__init__ = init


def accept_twice(states: type) -> None:
    """What is in the store already is a success to whoever sends it again. Its id is the digest of its content, so nothing else can be
    meant, and who has not the content learns nothing."""
    usual = states.store_object  # type: ignore[attr-defined]

    def store_object(self: Any, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        if usual(self, run_id, session_id, object_id, object_content):
            return True
        return get_object_id(object_content) == object_id and self.object_store.get(object_id) == object_content

    states.store_object = store_object  # type: ignore[attr-defined]


def superlink() -> None:
    wait_for_the_database()
    from flwr.supercore.corestate.in_memory_corestate import InMemoryCoreState
    from flwr.supercore.corestate.sql_corestate import SqlCoreState
    from flwr.superlink.cli import flower_superlink

    for states in (InMemoryCoreState, SqlCoreState):
        accept_twice(states)
    flower_superlink()


def supernode() -> None:
    from flwr.supercore.corestate.in_memory_corestate import InMemoryCoreState
    from flwr.supernode.cli import flower_supernode

    accept_twice(InMemoryCoreState)
    flower_supernode()


def main() -> None:
    programs = {"superlink": superlink, "supernode": supernode}
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in programs:
        raise SystemExit(f"usage: python -m holdfast.deploy.flower {{{','.join(programs)}}} ...")
    keep_connections()
    programs[name]()


if __name__ == "__main__":
    main()
