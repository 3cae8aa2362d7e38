"""Flower's SuperLink, SuperNode and SuperExec, changed so that they survive a busy machine, broken
connections and other users of the same machine. The changes are for flwr 1.41; object_children.py has one
more.

    python -m holdfast.deploy.flower superlink ...        the options of flower-superlink
    python -m holdfast.deploy.flower supernode ...        the options of flower-supernode
    python -m holdfast.deploy.flower superexec ...        the options of flower-superexec

What flwr 1.41 does without them, and the function here that changes it:
- a reply is lost if the database is locked for 5 seconds (wait_for_the_database);
- an object that is sent again because its receipt was lost is refused, which ends the run (accept_twice);
- receipts are lost often: server and sender both drop a connection that was idle for 5 seconds, so a request
  may meet a closing connection (keep_connections);
- a SuperNode whose TLS connection breaks for seconds gives up, and its process goes on without doing anything
  (retry_for_ever, supernode); the same happens when its heartbeat alone has died (Heartbeat);
- the token of a task, which is all that one needs to read a model and to answer, is in the process list, and
  a ClientApp whose SuperNode and SuperExec were killed tries to reach them for ever (start_apps_safely).

Each change has a test in tests/deploy/test_flower.py. If another version of Flower keeps one of the first
three elsewhere, it runs unchanged; the others are errors then."""

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
DATABASE_TIMEOUT = 60_000
"""Milliseconds to wait for the database: as long as Flower waits for a sign of life."""


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


def retry_for_ever(make: Callable[[], RetryInvoker]) -> Callable[[], RetryInvoker]:
    """Retry a server that was reached once after any transport error, also in the TLS handshake, where Flower
    gives up at once. A server that was never reached may be the wrong one: then the error is reported, and
    the supervisor of the node tries again."""

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
    """Retries when the server fails (500 and above). Any other error ends the process, because the server
    would consider the node gone while it goes on asking for messages."""

    def __init__(self, heartbeat_fn: Callable[[], bool]) -> None:
        def beat() -> bool:
            try:
                return heartbeat_fn()
            except httpx.HTTPStatusError as error:
                code = error.response.status_code
                if code >= 500 or code == httpx.codes.UNAUTHORIZED:  # 401: the server is stopping
                    return False
                raise

        super().__init__(beat)

    def _run(self) -> None:
        try:
            super()._run()
        except BaseException:
            traceback.print_exc()
            _leave(LOST, "the heartbeat has stopped; this node exits")


def _leave(code: int, line: str) -> None:
    """Exit without waiting for threads: one of them serves for ever."""
    print(line, file=sys.stderr, flush=True)
    os._exit(code)


def _end_with_superexec() -> None:
    """End a ClientApp with its SuperExec. Otherwise it tries to reach its SuperNode for ever, and a node is
    not started again while one of its processes lives. It may end at any moment: its files are written by
    atomic renames. A ServerApp goes on without its SuperExec, so it is left alone."""
    signal_at_parents_death(signal.SIGKILL)


def start_apps_safely() -> None:
    """Pass the token of a task to its process as standard input, from a file without a name, and not in the
    process list, which every user of the machine can read; and end a ClientApp with the SuperExec that
    started it."""
    from flwr.supercore.superexec.executor import subprocess_executor

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        place = command.index("--token")
        with (
            open(os.memfd_create("token"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()
        ) as file:
            file.write(command[place + 1].encode())
            file.flush()
            hidden = [*command[:place], "--token-file", "/dev/stdin", *command[place + 2 :]]
            return subprocess.Popen(
                hidden,
                stdin=file,
                preexec_fn=_end_with_superexec if hidden[0] == CLIENT_APP else None,
                **options,
            )

    vars(subprocess_executor)["subprocess"] = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)


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
        _leave(1, "the SuperNode has failed; this node exits")
    _leave(LOST, "the SuperNode has lost its connection; this node exits")


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
