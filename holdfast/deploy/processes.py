"""Starts and stops the Flower processes of a federation on one machine. Each writes its own log file; all
inherit one FLWR_HOME, by which they are found again, including children of children."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.core.errors import RunError
from holdfast.core.files import lock, unlock
from holdfast.deploy.forks import Fork, ForkServer, fork_here
from holdfast.deploy.heartbeat import ENVIRONMENT, FROZEN, away_file
from holdfast.deploy.sockets import remove_left_over

HOST = "127.0.0.1"
LOST = 75
"""Exit code of a node's process that has lost its server."""
Process = subprocess.Popen[bytes] | Fork
_EVERYWHERE = ("0.0.0.0", "::", "")
_QUIET = {  # no process sends anything to the outside or fetches anything
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "UV_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class Processes:
    """The processes of one folder, by name."""

    def __init__(self, flower: Path, logs: Path, connection: str = "lo"):
        self.flower, self.logs, self.connection = Path(flower).absolute(), Path(logs).absolute(), connection
        self.started: dict[str, Process] = {}
        self.forks: ForkServer | None = None
        self.extra: dict[str, dict[str, str]] = {}
        self.ports: dict[str, int] = {}  # where a process listens for others of this machine
        self.held: int | None = None
        self.freeze_limit = FROZEN
        # When a process gave its last sign of life, and when that was seen here.
        self._signs: dict[str, tuple[int, float]] = {}
        self._frozen: dict[str, Process] = {}

    def claim(self, taken: str) -> None:
        """Lock this folder until `stop`: of two that start at the same moment neither sees a process of the
        other yet, and each would end those of both. `taken` is the error message for the second."""
        self.flower.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.held = lock(self.flower / "up.lock")
        if self.held is None:
            raise RunError(taken)
        end = time.monotonic() + 10
        while _wake(self.alive()) and time.monotonic() < end:
            time.sleep(0.1)
        if self.alive():  # left by a killed one; they may be ending
            self._release()
            raise RunError(taken)
        remove_left_over()

    def _release(self) -> None:
        if self.held is not None:
            unlock(self.held)
            self.held = None

    def start(
        self, name: str, command: str, *arguments: str, module: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a program that is installed beside this Python, or a module of it. `extra` of this name is
        added to its environment. Its files are readable by their owner only."""
        program = [sys.executable, "-m", command] if module else [binary(command)]
        sign = self._expect(name)
        environment = {**self.environment(), ENVIRONMENT: str(sign), **self.extra.get(name, {})}
        self.started[name] = process = self._popen([*program, *arguments], environment, name)
        return process

    def fork(self, name: str, module: str, *arguments: str) -> Process:
        """Start a module of holdfast as a fork (forks.py): that is fast, and torch is in memory once. One
        with an environment of its own needs a new Python."""
        if self.extra.get(name):
            return self.start(name, module, *arguments, module=True)
        sign = self._expect(name)
        if self.forks is None or not self.forks.open:
            if os.environ.get("FLWR_HOME") == str(self.flower):
                self.forks = ForkServer(lambda _, file: fork_here(file, self.logs / "forks.log"))
            else:
                self.forks = ForkServer(
                    lambda command, file: self._popen(command, self.environment(), "forks", file)
                )
        log = self.logs / f"{name}.log"
        self.started[name] = process = self.forks.start(
            name, module, list(arguments), {ENVIRONMENT: str(sign)}, log
        )
        return process

    def _expect(self, name: str) -> Path:
        """Forget the signs of life of an earlier process of this name; return where the next are given."""
        for folder in (self.logs, self.flower / "alive"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        sign = self.sign(name)
        for old in (sign, away_file(sign)):
            old.unlink(missing_ok=True)
        self._signs.pop(name, None)
        return sign

    def _popen(
        self, command: list[str], environment: dict[str, str], name: str, *files: int
    ) -> subprocess.Popen[bytes]:
        with open(self.logs / f"{name}.log", "ab", opener=_for_its_owner) as log:
            return subprocess.Popen(
                command,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_die_with_parent,
                umask=0o077,
                pass_fds=files,
            )

    def sign(self, name: str) -> Path:
        """Return the file by which a process shows that it is alive."""
        return self.flower / "alive" / name

    def running(self) -> dict[str, Path]:
        """Return the signs of all processes that have not ended."""
        return {name: self.sign(name) for name, process in self.started.items() if process.poll() is None}

    def end_frozen(self) -> None:
        """End processes that gave a sign of life and then none for `freeze_limit` seconds. These are seconds
        of this process: a machine that slept, or a changed clock, ends none."""
        for name, sign in self.running().items():
            given, now = _written(sign), time.monotonic()
            if given is None or self._signs.get(name, (None, 0.0))[0] != given:
                self._signs[name] = (given or 0, now)
            elif given and now - self._signs[name][1] > self.freeze_limit:
                self._frozen[name] = self.started[name]
                _end(self.started[name])

    def how_it_ended(self, name: str) -> str:
        """Return the end of a process as text."""
        process = self.started[name]
        if self._frozen.get(name) is process:
            return f"gave no sign of life for {self.freeze_limit:g} s"
        if process.returncode == LOST:
            return "lost its connection to the server"
        return f"stopped with code {process.returncode}"

    def end(self, name: str) -> None:
        """End one of them, by force if it does not react."""
        if process := self.started.pop(name, None):
            _end(process)

    def stop(self) -> None:
        """End every process of this federation: those started here, and then their remaining children. A
        second Ctrl-C meanwhile must not leave half of them behind."""
        with _undisturbed():
            self._stop()
            remove_left_over()
            shutil.rmtree(self.flower / "alive", ignore_errors=True)
            self._release()

    def _stop(self) -> None:
        for process in reversed(self.started.values()):
            process.terminate()
        end = time.monotonic() + 10
        for process in self.started.values():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.started = {}
        if self.forks is not None:
            self.forks.close()
            self.forks = None
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
        """Return the ids of all processes of this folder."""
        mark, own = f"FLWR_HOME={self.flower}".encode(), os.getpid()
        found = [pid for pid, environment in _environments() if mark in environment.split(b"\0")]
        return [pid for pid in found if pid != own]

    def check_alive(self, *names: str) -> None:
        """Raise an error if one of these processes, or of all, has ended."""
        for name, process in self.started.items():
            if process.poll() is not None and (not names or name in names):
                raise RunError(f"{name} stopped with code {process.returncode}; see {self.logs / name}.log")

    def wait_for_port(self, port: int, name: str, host: str = HOST, seconds: float = 120.0) -> None:
        """Wait until this process answers; the others are not checked."""
        end, reached = time.monotonic() + seconds, HOST if host in _EVERYWHERE else host
        while time.monotonic() < end:
            self.check_alive(name)
            try:
                socket.create_connection((reached, port), timeout=5).close()
                return
            except OSError:
                time.sleep(0.2)
        raise RunError(f"the {name} does not answer on {reached}:{port} after {seconds:g} s; see {self.logs}")

    def environment(self) -> dict[str, str]:
        """Return the environment. Our folders come first on both paths, so Flower's children find the same
        programs and the same holdfast."""
        paths = {
            "PATH": str(Path(sys.executable).parent),
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
        joined = {
            name: os.pathsep.join(filter(None, [first, inherited.get(name)])) for name, first in paths.items()
        }
        return {**inherited, **_QUIET, **joined, "FLWR_HOME": str(self.flower)}

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """Run Flower's own command line, whose answer is JSON."""
        command = [binary("flwr"), *arguments, "--format", "json"]
        try:
            done = subprocess.run(
                command, env=self.environment(), capture_output=True, text=True, timeout=300
            )
        except subprocess.TimeoutExpired:
            raise RunError(f"flwr {arguments[0]} has not answered within 300 s; see {self.logs}") from None
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            answer = {}
        if done.returncode != 0 or not answer.get("success", True):
            said = answer.get("error-message") or done.stdout + done.stderr
            raise RunError(f"flwr {arguments[0]} failed: {said[-500:].strip()}")
        return answer

    def finish(self, run: str, end: float, result: Path) -> tuple[str, str]:
        """Wait for the end of a run; return its status and Flower's details. Asking costs Flower's command
        line a second of computing, so it is done seldom, and at once when the run has written its
        `result`."""
        seen = _written(result)
        while True:
            listed = self.flwr("list", self.connection, "--run-id", run)["runs"][0]
            if listed["status"].startswith("finished"):
                return listed["status"], listed.get("status-details", "")
            if time.monotonic() > end:
                raise RunError(f"the federation has not finished in time; see {self.logs}")
            self.check_alive()
            asked, before, seen = time.monotonic(), seen, _written(result)
            while seen == before and time.monotonic() < asked + 6:
                time.sleep(0.3)
                seen = _written(result)

    def keep_log(self, run: str) -> None:
        """Save the log of the ServerApp; Flower has it in the SuperLink, which is about to stop."""
        with open(self.logs / f"run-{run}.log", "wb", opener=_for_its_owner) as log:
            command = [binary("flwr"), "log", run, self.connection, "--show"]
            try:
                subprocess.run(
                    command, env=self.environment(), stdout=log, stderr=subprocess.STDOUT, timeout=120
                )
            except subprocess.TimeoutExpired:  # the SuperLink has stopped
                pass


def begin_as_parent(flower: Path, logs: Path) -> None:
    """Begin this program again with the environment by which the processes of this folder are found, unless
    it has that. Then they are forks of this process, and torch is in memory once. Call it before torch is
    imported."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    ours = Path(sys.argv[0]).name == "holdfast" or (spec is not None and spec.name.startswith("holdfast."))
    processes = Processes(flower, logs)
    if ours and os.environ.get("FLWR_HOME") != str(processes.flower):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], processes.environment())


def options(**values: object) -> list[str]:
    """Return command-line options: `options(root_certificates="x")` is --root-certificates x."""
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def binary(name: str) -> str:
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise RunError(
            f"{name} is not installed beside {Path(sys.executable).name}; pip install 'holdfast[flower]'"
        )
    return str(path)


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _end(process: Process) -> None:
    process.terminate()
    # A frozen process reacts only then; a SuperNode that deactivates itself can reconnect at once.
    process.send_signal(signal.SIGCONT)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _undisturbed() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread only
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def in_use(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # Connections of a program that has just stopped do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise RunError(
                f"cannot listen on {host}:{port}: {error.strerror}; see federation.listen"
            ) from None
    return False


def _written(file: Path) -> int | None:
    """Return when a file was last written; None if it does not exist."""
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _environments() -> Iterator[tuple[int, bytes]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            yield int(folder.name), (folder / "environ").read_bytes()
        except OSError:  # another user's, or just gone
            continue


def _wake(pids: list[int]) -> bool:
    """Wake frozen processes of a killed parent, which were signalled to stop; return whether there were
    any."""
    frozen = False
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
                frozen = True
                os.kill(pid, signal.SIGCONT)
        except OSError:  # another user's, or just gone
            continue
    return frozen


_LIBC = ctypes.CDLL(None)  # loaded before any fork


def _die_with_parent() -> None:
    """Linux: when the process that started the federation is killed, the federation stops too."""
    signal_at_parents_death(signal.SIGTERM)


def signal_at_parents_death(which: signal.Signals) -> None:
    """Linux: have this signal sent when the parent dies. Call it in a new process before its program
    begins."""
    if sys.platform == "linux":
        _LIBC.prctl(1, which)  # PR_SET_PDEATHSIG
