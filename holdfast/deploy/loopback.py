"""A whole federation on this machine: SuperLink, one SuperNode per client and the apps, as real processes that talk over 127.0.0.1.

    python -m holdfast.deploy.loopback CONFIG --out DIR

It shows that no method knows where it runs: the bits are those of the simulator on plan `loop` with as many threads. All that Flower
writes lies under DIR/flower: home/ is its own, logs/ has one file per process, node0/ ... are the clients' disks."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import holdfast
from holdfast.core.errors import HoldfastError, RunError

_HOST = "127.0.0.1"
_APP = """[project]
name = "holdfast-app"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "local"
[tool.flwr.app.components]
serverapp = "holdfast.deploy.server_app:app"
clientapp = "holdfast.deploy.client_app:app"
[tool.flwr.app.config]
"""
_QUIET = {  # nothing is sent to or fetched from the outside, by any process
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "UV_OFFLINE": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds; by default 1
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Outcome:
    """How a run on the federation ended. `result` is what `holdfast run --json` prints."""

    status: str
    seconds: float
    result: Mapping[str, Any]


def run_loopback(
    config: Path | str, out: Path | str, clients: int | None = None, timeout: float = 900.0, deadline: float = 120.0
) -> Outcome:
    """Start a federation of all clients, or of the first few, play one experiment, stop everything. The same `out` again goes on where
    the last one stopped. What is wrong with the config is said before anything starts."""
    from holdfast.deploy.node import expected, federated  # imports torch: not for --help

    everybody = expected(federated(config))
    with Loopback(Path(out) / "flower", everybody if clients is None else clients) as federation:
        return federation.run(config, out, timeout, deadline)


class Loopback:
    """The processes of a federation, from `with` to its end, however it ends."""

    def __init__(self, home: Path, clients: int):
        self.home, self.clients = Path(home).absolute(), clients
        self.flower = self.home / "home"
        self.port = _free_port()
        self.started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Loopback:
        for folder in (self.flower, self.home / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        lines = ['[superlink]\ndefault = "lo"', f'[superlink.lo]\naddress = "{_HOST}:{self.port}"\ninsecure = true']
        (self.flower / "config.toml").write_text("\n".join(lines) + "\n")
        try:
            self._start("superlink", "flower-superlink", "--insecure", "--host", _HOST, "--port", str(self.port))
            self._wait_for_superlink()
            for client in range(self.clients):
                config = f"client-id={client} state-dir={json.dumps(str(self.home / f'node{client}'))}"
                own = ["--insecure", "--host", _HOST, "--port", str(_free_port()), "--superlink", f"{_HOST}:{self.port}"]
                self._start(f"supernode{client}", "flower-supernode", *own, "--node-config", config)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, config: Path | str, out: Path | str, timeout: float = 900.0, deadline: float = 120.0) -> Outcome:
        """Play one experiment to its end. The app that Flower ships to the nodes is one file that names ours."""
        out, began = Path(out).absolute(), time.monotonic()
        app = self.home / "app"
        app.mkdir(exist_ok=True)
        settings = {"config": str(Path(config).absolute()), "out": str(out), "deadline": float(deadline), "join": float(deadline)}
        (app / "pyproject.toml").write_text(_APP + "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
        run = str(self._flwr("run", str(app), "lo", "--format", "json")["run-id"])
        try:
            status, details = self._finish(run, began + timeout)
        finally:
            self._keep_log(run)
        if status != "finished:completed":
            raise RunError(f"the federation's run ended as {status} ({details}); see {self.home / 'logs'}")
        return Outcome(status, time.monotonic() - began, json.loads((out / "result.json").read_text()))

    def _finish(self, run: str, end: float) -> tuple[str, str]:
        """Wait for the end of a run: its status, and what Flower says of it."""
        while True:
            listed = self._flwr("list", "lo", "--run-id", run, "--format", "json")["runs"][0]
            if listed["status"].startswith("finished"):
                return listed["status"], listed.get("status-details", "")
            if time.monotonic() > end:
                raise RunError(f"the federation has not finished in time; see {self.home / 'logs'}")
            self._check_alive()
            time.sleep(3)  # a question costs Flower's command line a second of computing

    def _keep_log(self, run: str) -> None:
        """What the ServerApp said; Flower has it in the SuperLink, which is about to stop."""
        with open(self.home / "logs" / f"run-{run}.log", "wb") as log:
            command = [_binary("flwr"), "log", run, "lo", "--show"]
            subprocess.run(command, env=self._environment(), stdout=log, stderr=subprocess.STDOUT, timeout=120)

    def stop(self) -> None:
        """End every process of this federation: those started here, and then whatever they have started and left."""
        for process in reversed(self.started):
            process.terminate()
        end = time.monotonic() + 10
        for process in self.started:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.started = []
        for stop_signal in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.alive():
                try:
                    os.kill(pid, stop_signal)
                except ProcessLookupError:
                    pass
            end = time.monotonic() + 5
            while self.alive() and time.monotonic() < end:
                time.sleep(0.1)

    def alive(self) -> list[int]:
        """The processes of this federation, children of children included: all inherit its FLWR_HOME, which nobody else has."""
        mark = f"FLWR_HOME={self.flower}".encode()
        return [pid for pid, environment in _environments() if mark in environment.split(b"\0")]

    def _start(self, name: str, command: str, *arguments: str) -> None:
        with open(self.home / "logs" / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [_binary(command), *arguments], env=self._environment(), stdout=log, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip
        self.started.append(process)

    def _environment(self) -> dict[str, str]:
        """Ours first on both paths, so that Flower's children find the same programs and the same holdfast."""
        paths = {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": str(Path(holdfast.__file__).parents[1])}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
        joined = {name: os.pathsep.join(filter(None, [first, inherited.get(name)])) for name, first in paths.items()}
        return {**inherited, **_QUIET, **joined, "FLWR_HOME": str(self.flower)}

    def _wait_for_superlink(self, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._check_alive()
            with socket.socket() as probe:
                if probe.connect_ex((_HOST, self.port)) == 0:
                    return
            time.sleep(0.2)
        raise RunError(f"the SuperLink does not answer on {_HOST}:{self.port} after {seconds:g} s; see {self.home / 'logs'}")

    def _check_alive(self) -> None:
        for process in self.started:
            if process.poll() is not None:
                raise RunError(f"{Path(str(process.args[0])).name} stopped with code {process.returncode}; see {self.home / 'logs'}")  # type: ignore[index]

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run([_binary("flwr"), *arguments], env=self._environment(), capture_output=True, text=True, timeout=120)
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            answer = {}
        if done.returncode != 0 or not answer.get("success", True):
            raise RunError(f"flwr {arguments[0]} failed: {(answer.get('error-message') or done.stdout + done.stderr)[-500:].strip()}")
        return answer


def _binary(name: str) -> str:
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise RunError(f"{name} is not installed beside {Path(sys.executable).name}; pip install 'holdfast[flower]'")
    return str(path)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _environments() -> Iterator[tuple[int, bytes]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            yield int(folder.name), (folder / "environ").read_bytes()
        except OSError:  # another user's, or just gone
            continue


_LIBC = ctypes.CDLL(None)  # loaded before any fork


def _die_with_parent() -> None:
    """Linux: when whoever started the federation is killed, and cannot stop it, the federation stops too."""
    if sys.platform == "linux":
        _LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def main() -> None:
    parser = argparse.ArgumentParser("python -m holdfast.deploy.loopback", description="Play an experiment on Flower, on this machine.")
    parser.add_argument("config", help="the experiment's TOML file")
    parser.add_argument("--out", required=True, help="the run directory; the same one again continues a stopped run")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for the whole run (default 900)")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds a client has for one request (default 120)")
    chosen = parser.parse_args()
    try:
        outcome = run_loopback(chosen.config, chosen.out, timeout=chosen.timeout, deadline=chosen.deadline)
    except HoldfastError as error:
        sys.exit(f"error: {error}")
    print(f"{outcome.status} in {outcome.seconds:.0f} s; accuracy {outcome.result['final']['accuracy']}; run in {chosen.out}")


if __name__ == "__main__":
    main()
