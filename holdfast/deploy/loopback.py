"""A trial federation on this machine: SuperLink, one SuperNode per client and the apps, as real processes
that talk over 127.0.0.1. Without keys and certificates: `holdfast federation` is for the real one.

    python -m holdfast.deploy.loopback CONFIG --out DIR

It shows that no method knows where it runs: the bits are those of the simulator on plan `loop` with as many
threads. All that Flower writes is under DIR/flower: home/ is its own, logs/ has one file per process, node0/
... are the clients' disks."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError, RunError
from holdfast.deploy.flower_app import write_app
from holdfast.deploy.processes import HOST, Processes, free_port, options
from holdfast.deploy.sockets import socket_of


@dataclass(frozen=True)
class Outcome:
    """How a run on the federation ended. `result` is what `holdfast run --json` prints."""

    status: str
    seconds: float
    result: Mapping[str, Any]


def run_loopback(
    config: Path | str,
    out: Path | str,
    clients: int | None = None,
    timeout: float = 900.0,
    deadline: float = 120.0,
) -> Outcome:
    """Start a federation of all clients, or of the first few, run one experiment, stop everything. The same
    `out` continues where the last run stopped. Errors in the config are raised before anything starts."""
    from holdfast.deploy.node import expected, federated  # imports torch: not for --help

    all_clients = expected(federated(config))
    with Loopback(Path(out) / "flower", all_clients if clients is None else clients) as federation:
        return federation.run(config, out, timeout, deadline)


class Loopback:
    """The processes of a federation, from `with` to its end, however it ends. Nodes with a resident trainer
    answer sooner, and give the same bits."""

    def __init__(self, home: Path, clients: int, resident: bool = True):
        self.home, self.clients, self.resident = Path(home).absolute(), clients, resident
        self.port = free_port()
        self.processes = Processes(self.home / "home", self.home / "logs")

    def __enter__(self) -> Loopback:
        flower = self.processes.flower
        flower.mkdir(parents=True, exist_ok=True)
        lines = [
            '[superlink]\ndefault = "lo"',
            f'[superlink.lo]\naddress = "{HOST}:{self.port}"\ninsecure = true',
        ]
        (flower / "config.toml").write_text("\n".join(lines) + "\n")
        try:
            address = ["--host", HOST, "--port", str(self.port)]
            self.processes.start(
                "superlink", "holdfast.deploy.flower", "superlink", "--insecure", *address, module=True
            )
            self.processes.wait_for_port(self.port, "superlink")
            for client in range(self.clients):
                self._start_node(client)
        except BaseException:
            self.stop()
            raise
        return self

    def _start_node(self, client: int) -> None:
        disk = self.home / f"node{client}"
        settings: dict[str, object] = {"client-id": client, "state-dir": str(disk)}
        if self.resident:
            listens = settings["trainer"] = str(socket_of(disk))
            self.processes.fork(f"trainer{client}", "holdfast.deploy.trainer", "--socket", listens)
        where = options(superlink=f"{HOST}:{self.port}", settings=json.dumps(settings))
        self.processes.fork(f"node{client}", "holdfast.deploy.supernode", *where)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.processes.stop()

    def alive(self) -> list[int]:
        return self.processes.alive()

    def run(
        self,
        config: Path | str,
        out: Path | str,
        timeout: float = 900.0,
        deadline: float = 120.0,
        everybody: bool = False,
    ) -> Outcome:
        """Run one experiment to its end. With `everybody`, a client that does not answer is asked again until
        it does."""
        out, began = Path(out).absolute(), time.monotonic()
        settings = {
            "config": str(Path(config).absolute()),
            "out": str(out),
            "deadline": float(deadline),
            "join": float(deadline),
        }
        if everybody:
            settings |= {"quorum": 1.0, "wait": float(timeout)}
        run = str(self.processes.flwr("run", str(write_app(self.home / "app", settings)), "lo")["run-id"])
        try:
            status, details = self.processes.finish(run, began + timeout, out / "result.json")
        finally:
            self.processes.keep_log(run)
        if status != "finished:completed":
            raise RunError(f"the federation's run ended as {status} ({details}); see {self.processes.logs}")
        return Outcome(status, time.monotonic() - began, json.loads((out / "result.json").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m holdfast.deploy.loopback", description="Run an experiment on Flower, on this machine."
    )
    parser.add_argument("config", help="the experiment's TOML file")
    parser.add_argument(
        "--out", required=True, help="the run directory; the same one again continues a stopped run"
    )
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds for the whole run (default 900)"
    )
    parser.add_argument(
        "--deadline", type=float, default=120.0, help="seconds a client has for one request (default 120)"
    )
    chosen = parser.parse_args()
    try:
        outcome = run_loopback(chosen.config, chosen.out, timeout=chosen.timeout, deadline=chosen.deadline)
    except HoldfastError as error:
        sys.exit(f"error: {error}")
    print(
        f"{outcome.status} in {outcome.seconds:.0f} s; accuracy {outcome.result['final']['accuracy']}; run in"
        f" {chosen.out}"
    )


if __name__ == "__main__":
    main()
