"""Flower's SuperLink and SuperExec, with the changes of flower_patches.py.

python -m holdfast.deploy.flower superlink ...        the options of flower-superlink
python -m holdfast.deploy.flower superexec ...        the options of flower-superexec"""

from __future__ import annotations

import socket
import sys
import time

from holdfast.deploy.flower_patches import (
    accept_twice,
    clean_up_seldom,
    hide_tokens,
    keep_connections,
    let_the_server_correct,
    wait_for_the_database,
)
from holdfast.deploy.heartbeat import show_life


def wait_for_listener(arguments: list[str], seconds: float = 60.0) -> None:
    """Wait until a process listens at --runtime-api-address: Flower waits longer after every try, which would
    delay the first task."""
    host, _, port = arguments[arguments.index("--runtime-api-address") + 1].rpartition(":")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            return socket.create_connection((host, int(port)), timeout=5).close()
        except OSError:
            time.sleep(0.2)


def superlink() -> None:
    wait_for_the_database()
    from flwr.supercore.corestate.in_memory_corestate import InMemoryCoreState
    from flwr.supercore.corestate.sql_corestate import SqlCoreState
    from flwr.supercore.object_store.sql_object_store import SqlObjectStore
    from flwr.superlink.cli import flower_superlink
    from flwr.superlink.servicer.runtime import runtime_handlers

    for states in (InMemoryCoreState, SqlCoreState):
        accept_twice(states)
    clean_up_seldom(SqlCoreState)
    let_the_server_correct(SqlObjectStore, runtime_handlers)
    flower_superlink()


def superexec() -> None:
    from flwr.supercore.cli import flower_superexec

    hide_tokens()
    wait_for_listener(sys.argv)
    flower_superexec()


def main() -> None:
    programs = {"superlink": superlink, "superexec": superexec}
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in programs:
        raise SystemExit(f"usage: python -m holdfast.deploy.flower {{{','.join(programs)}}} ...")
    show_life()
    keep_connections()
    programs[name]()


if __name__ == "__main__":
    main()
