"""The Flower ServerApp: drives the same experiment as the simulator, with Flower nodes as its clients.

The run's settings (`[tool.flwr.app.config]` or `flwr run -c`): config, the experiment's TOML file; out, its
run directory; deadline, seconds that clients have for a request; join, seconds to wait for clients at the
start; quorum, wait and retry, for how many clients it waits, how long, and how often it asks again; ledger
and strikes, where clients are known by their keys; plugins, files, one to a line. Every round is committed to
`out`, so starting again with the same `out` continues where the last server stopped."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.common import log
from flwr.serverapp import Grid, ServerApp

from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_json
from holdfast.core.reading import is_whole, read_json
from holdfast.core.registry import load_plugin
from holdfast.deploy.admission import Admission, KeyedAdmission, OpenAdmission
from holdfast.deploy.audit import Audit
from holdfast.deploy.flower_engine import FlowerEngine, WaitSettings
from holdfast.deploy.keys import load_private
from holdfast.deploy.ledger import Ledger
from holdfast.deploy.messaging import Messaging
from holdfast.deploy.node import expected, federated
from holdfast.deploy.notices import ANSWERED, Notices
from holdfast.experiment.config import Config
from holdfast.experiment.runner import RunCallbacks
from holdfast.sweeps.session import resume, start

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment. A reason to stop is written beside the ledger, so `up` can distinguish it from a
    killed ServerApp."""
    settings = context.run_config
    try:
        serve(grid, settings)
    except HoldfastError as error:
        if settings.get("ledger"):
            write_json(Path(str(settings["ledger"])).with_name("stopped.json"), {"reason": str(error)})
        raise


def serve(grid: Grid, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Run the experiment to its end and return its result."""
    for plugin in filter(None, str(settings.get("plugins", "")).split("\n")):
        load_plugin(plugin)
    config, out = federated(str(settings["config"])), Path(str(settings["out"]))
    waits = {
        name: float(settings[name])
        for name in ("deadline", "join", "quorum", "wait", "retry")
        if name in settings
    }
    wait_settings = WaitSettings(**waits)
    ledger = Ledger(Path(str(settings["ledger"]))) if settings.get("ledger") else None
    messaging = Messaging(grid) if ledger is None else _signed_messaging(grid, ledger)
    try:
        return _run(settings, config, out, messaging, wait_settings, ledger)
    finally:
        if messaging.notices is not None:
            messaging.notices.close()


def _run(
    settings: Mapping[str, Any],
    config: Config,
    out: Path,
    messaging: Messaging,
    wait_settings: WaitSettings,
    ledger: Ledger | None,
) -> dict[str, Any]:
    admission = _admission(messaging, config, wait_settings, ledger, int(settings.get("strikes", 3)))
    engine, audit = FlowerEngine(messaging, config, admission, wait_settings), Audit(ledger, out)
    watch = RunCallbacks(say=lambda line: log(INFO, line), moved=audit.follow, planned=audit.begin)
    if (out / "head.json").exists():
        result = resume(out, watch, engine=engine.with_simulator, config=config)[0]
    else:
        # The label names the run on the clients' disks for as long as it lives, so it must be no other run's.
        label = re.sub(r"[^A-Za-z0-9_=-]", "_", out.name)[:60] + "-" + secrets.token_hex(4)
        result = start([(label, config)], out, watch, engine=engine.with_simulator)[0]
    audit.finish(result)
    return result


def _signed_messaging(grid: Grid, ledger: Ledger) -> Messaging:
    """Return messaging with the server's key. A mark left by an earlier start names the client whose reply it
    was reading when it died: that goes into the ledger."""
    folder = ledger.path.parent
    mark, head = folder / "reading.json", folder / "ledger.head"
    if (left := read_json(mark)) is not None:
        client, round = left.get("client"), left.get("round")
        if is_whole(client) and is_whole(round):
            said = "the server stopped while it read this client's reply"
            ledger.append("suspect", client, round, reason=said, task=str(left.get("task")))
        mark.unlink()
    return Messaging(
        grid,
        key=load_private(folder / "orders.key"),
        head=lambda: head.read_text() if head.exists() else "",
        mark=mark,
        notices=Notices(folder, ANSWERED),
    )


def _admission(
    messaging: Messaging, config: Config, wait_settings: WaitSettings, ledger: Ledger | None, strikes: int
) -> Admission:
    if ledger is None:
        return OpenAdmission(messaging, expected(config), wait_settings.deadline)
    return KeyedAdmission(messaging, expected(config), ledger, strikes)
