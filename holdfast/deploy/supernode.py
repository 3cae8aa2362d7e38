"""The process of a node that talks to the server: it takes one order after the other, has it performed by
the node's trainer, and sends the reply.

    python -m holdfast.deploy.supernode --superlink HOST:PORT --authority CA.PEM --settings JSON

The settings are those of client_app.py, which performs the orders. Nothing that the server sends is executed:
Flower would send every node the app of a run and run it there."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from logging import ERROR, INFO
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.common import log
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from holdfast.core.errors import HoldfastError
from holdfast.deploy import keys
from holdfast.deploy.client_app import app
from holdfast.deploy.fleet_connection import FleetConnection, Lost, RunEnded, leave
from holdfast.deploy.heartbeat import show_life
from holdfast.deploy.memory import give_back_memory
from holdfast.deploy.processes import LOST

_HELD = 0.5  # seconds: an empty answer that takes longer was held until there might be something
_FIRST, _LONGEST = 0.05, 1.0  # seconds between two questions that are answered at once


class Pause:
    """How long to wait between two questions. Where empty answers are held, the next follows at once; a
    SuperLink without our proxy answers at once, and is asked ever more seldom."""

    def __init__(self) -> None:
        self.next = _FIRST

    def after(self, seconds: float) -> float:
        """Return the pause after an empty answer that took so many seconds."""
        if seconds > _HELD:
            self.next = _FIRST
            return 0.0
        pause, self.next = self.next, min(2 * self.next, _LONGEST)
        return pause


def serve(link: FleetConnection, settings: dict[str, Any], sleep: Callable[[float], None]) -> None:
    """Answer messages for ever."""
    runs: dict[int, dict[str, Any]] = {}
    pause = Pause()
    while True:
        began = time.monotonic()
        try:
            taken = link.pull()
        except RunEnded:
            taken = None
        if taken is None:
            sleep(pause.after(time.monotonic() - began))
            continue
        pause = Pause()
        message, tree = taken
        run = message.metadata.run_id
        try:
            if run not in runs:
                runs = {run: {} if "config" in settings else link.settings_of(run)}
            message = link.fetch(message, tree)
            log(INFO, "received: %s message %s", message.metadata.message_type, message.metadata.message_id)
            began = time.monotonic()
            reply = answer(message, Context(run, link.node.node_id, settings, RecordDict(), runs[run]))
            link.send(reply, time.monotonic() - began)
            log(INFO, "answered after %.2f s", time.monotonic() - began)
            del message, reply
            give_back_memory()
        except RunEnded:
            log(INFO, "the run has ended; message %s is left", message.metadata.message_id)
        except Lost:
            raise
        except Exception as error:  # the server counts this client as absent and goes on
            log(ERROR, "message %s failed: %s", message.metadata.message_id, error)


def answer(message: Message, context: Context) -> Message:
    """Return the reply of the ClientApp; an error of it is told to the server, as Flower does."""
    TaskIdentity.run_id, TaskIdentity.node_id = context.run_id, context.node_id
    TaskIdentity.task_id = 1  # Flower numbers the processes of its apps; here there is one
    try:
        return app(message, context)
    except Exception as error:
        log(ERROR, "the message could not be answered", exc_info=error)
        why = f"{type(error)}:<'{error}'>"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, why), reply_to=message)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m holdfast.deploy.supernode", description="A node's connection to the server."
    )
    parser.add_argument("--superlink", required=True)
    parser.add_argument("--authority", type=Path, help="without it the connection is not encrypted")
    parser.add_argument("--settings", required=True, type=json.loads)
    given = parser.parse_args()
    show_life()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        key = keys.load_private(Path(given.settings["key"])) if "key" in given.settings else None
        with FleetConnection(given.superlink, given.authority, key) as link:
            log(INFO, "this node is %d", link.node.node_id)
            serve(link, given.settings, time.sleep)
    except HoldfastError as error:
        leave(1, str(error))
    except Exception as error:
        leave(LOST, f"the connection to the server is lost ({error}); this node exits")


if __name__ == "__main__":
    main()
