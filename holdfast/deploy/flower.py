"""Flower's SuperLink, SuperNode and SuperExec, made to bear a busy machine, a broken line and strangers on
the same machine.

    python -m holdfast.deploy.flower superlink ...        the options of flower-superlink
    python -m holdfast.deploy.flower supernode ...        the options of flower-supernode
    python -m holdfast.deploy.flower superexec ...        the options of flower-superexec

What goes wrong without this:
- a reply that finds the database locked for 5 seconds is lost;
- what is sent again because its receipt was lost is refused, since it is there already, and that ended a
  whole run;
- receipts are lost more often than need be: server and sender both drop a connection that has been idle for 5
  seconds, so that a request
  may meet a closing one;
- a SuperNode whose TLS connection breaks for seconds gives up, and its process stays without doing anything;
  so it does when its heartbeat
  alone has died;
- the token of a task, which is all that one needs to read a model and to answer, stands in the process list;
- a ClientApp whose SuperNode and SuperExec were killed tries to reach them for ever.

A Flower that keeps one of the first three elsewhere goes on as it is; the others are errors there."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
from flwr.supercore import constant
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import get_object_id
from flwr.supercore.retry import RetryInvoker

from holdfast.deploy.heartbeat import note_away, show_life
from holdfast.deploy.processes import LOST, signal_at_parents_death
from holdfast.deploy.proxy_limits import Limits

CLIENT_APP = constant.TASK_TYPE_TO_COMMAND[constant.TaskType.CLIENT_APP]
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
        self.timeout_keep_alive = max(self.timeout_keep_alive, int(Limits.idle))

    vars(uvicorn)["Config"].__init__ = init


def accept_twice(states: type) -> None:
    """What is in the store already is a success to whoever sends it again. Its id is the digest of its
    content, so nothing else can be meant, and who has not the content learns nothing."""
    usual = states.store_object  # type: ignore[attr-defined]

    def store_object(self: Any, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        if usual(self, run_id, session_id, object_id, object_content):
            return True
        return (
            get_object_id(object_content) == object_id and self.object_store.get(object_id) == object_content
        )

    states.store_object = store_object  # type: ignore[attr-defined]


def retry_for_ever(make: Callable[[], RetryInvoker]) -> Callable[[], RetryInvoker]:
    """A server that was reached once is tried again whatever the line does, also in the TLS handshake, where
    Flower gives up at once. One that was never reached may be the wrong one: that is said, and whoever keeps
    the node up tries again."""

    def made() -> RetryInvoker:
        invoker, reached = make(), False
        success, backoff, giveup = invoker.on_success, invoker.on_backoff, invoker.should_giveup

        def on_success(state: Any) -> None:
            nonlocal reached
            if not reached or state.tries > 1:
                note_away(False)
            reached = True
            if success:
                success(state)

        def on_backoff(state: Any) -> None:
            note_away(True)
            if backoff:
                backoff(state)

        def should_giveup(error: Exception) -> bool:
            return (
                not (reached and isinstance(error, httpx.TransportError))
                and giveup is not None
                and giveup(error)
            )

        invoker.on_success, invoker.on_backoff, invoker.should_giveup = on_success, on_backoff, should_giveup
        return invoker

    return made


class Heartbeat(HeartbeatSender):
    """A server in trouble (500 and above) is tried again. What else ends the heartbeat ends the process,
    since the server would take the node for gone while it goes on asking for messages."""

    def __init__(self, heartbeat_fn: Callable[[], bool]) -> None:
        def beat() -> bool:
            try:
                return heartbeat_fn()
            except httpx.HTTPStatusError as error:
                if (
                    error.response.status_code >= 500
                    or error.response.status_code == httpx.codes.UNAUTHORIZED
                ):  # 401: it is stopping
                    return False
                raise

        super().__init__(beat)

    def _run(self) -> None:
        try:
            super()._run()
        except BaseException:
            traceback.print_exc()
            _leave(LOST, "the heartbeat has stopped, so the node ends")


def _leave(code: int, said: str) -> None:
    """Without waiting for threads: one of them serves for ever."""
    print(said, file=sys.stderr, flush=True)
    os._exit(code)


def _end_with_superexec() -> None:
    """A ClientApp whose SuperNode is gone tries to reach it for ever, and a node is not started again while a
    process of it lives. It may end at any moment: what it keeps is written by atomic renames. A ServerApp
    goes on without its SuperExec, so it is left alone."""
    signal_at_parents_death(signal.SIGKILL)


def start_apps_safely() -> None:
    """The token of a task goes to its process by a file without a name, as its standard input, and not by the
    process list, which every user of the machine can read; and a ClientApp ends with the SuperExec that
    started it."""
    from flwr.supercore.superexec.executor import subprocess_executor

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        place = command.index("--token")
        with (
            open(os.memfd_create("token"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()
        ) as file:
            file.write(command[place + 1].encode())
            file.flush()
            unseen = [*command[:place], "--token-file", "/dev/stdin", *command[place + 2 :]]
            return subprocess.Popen(
                unseen,
                stdin=file,
                preexec_fn=_end_with_superexec if unseen[0] == CLIENT_APP else None,
                **options,
            )

    vars(subprocess_executor)["subprocess"] = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)


def wait_for_listener(arguments: list[str], seconds: float = 60.0) -> None:
    """Until somebody listens at --runtime-api-address: Flower waits longer after every try, which would delay
    the first task."""
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

    from holdfast.deploy.object_children import let_the_server_correct

    for states in (InMemoryCoreState, SqlCoreState):
        accept_twice(states)
    let_the_server_correct(SqlObjectStore, runtime_handlers)
    flower_superlink()


def supernode() -> None:
    from flwr.supercore.corestate.in_memory_corestate import InMemoryCoreState
    from flwr.supernode import cli, fleet_http_connection

    accept_twice(InMemoryCoreState)
    changed = {
        "make_simple_http_retry_invoker": retry_for_ever(fleet_http_connection.make_simple_http_retry_invoker)
    }
    vars(fleet_http_connection).update(changed, HeartbeatSender=Heartbeat)
    try:
        cli.flower_supernode()
    except Exception:
        traceback.print_exc()
        _leave(1, "the SuperNode has failed, so the node ends")
    _leave(LOST, "the SuperNode has lost its connection, so the node ends")


def superexec() -> None:
    from flwr.supercore.cli import flower_superexec

    start_apps_safely()
    wait_for_listener(sys.argv)
    flower_superexec()


def main() -> None:
    programs = {"superlink": superlink, "supernode": supernode, "superexec": superexec}
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in programs:
        raise SystemExit(f"usage: python -m holdfast.deploy.flower {{{','.join(programs)}}} ...")
    show_life()
    keep_connections()
    programs[name]()


if __name__ == "__main__":
    main()
