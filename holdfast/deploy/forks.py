"""Starts the processes of nodes as forks of one process that has torch and Flower in memory: a fork takes
milliseconds and a few megabytes, a new Python takes seconds and two hundred.

    python -m holdfast.deploy.forks --line FD        ends with the process that started it, as do its forks

A request is a line of JSON: name, module (whose `main` is called), arguments, environment and log. The
answers are lines too: that a process has started, and later how it ended. The process that forks has one
thread only and computes nothing, so its forks begin in a state without locks that are held."""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.core.errors import RunError
from holdfast.deploy.memory import give_back_memory

_PRELOADED = ("holdfast.deploy.supernode", "holdfast.deploy.trainer", "holdfast.deploy.node_worker")
_PARTS = ("method", "aggregator", "detector", "model", "optimizer", "loss")
_START = 300.0  # seconds for the first answer: torch is imported before it
_REPORT = 2.0  # seconds after which an end that is not reported is taken as a kill
_PDEATHSIG, _NAME = 1, 15  # operations of prctl
_LIBC = ctypes.CDLL(None)  # loaded before any fork


class Fork:
    """A forked process, to be used like a Popen."""

    def __init__(self, server: ForkServer, pid: int):
        self.server, self.pid = server, pid
        self.returncode: int | None = None
        self._gone: float | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.server.read()
        if self.returncode is None and not _lives(self.pid):
            self._gone = self._gone or time.monotonic()
            if not self.server.open or time.monotonic() - self._gone > _REPORT:
                self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.server.read(0.1)
            time.sleep(0 if self.server.open else 0.1)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The process that forks, seen from the one that asks. `popen` starts a program with an open file."""

    def __init__(self, popen: Callable[[list[str], int], subprocess.Popen[bytes] | ForkHere]):
        self.line, other = socket.socketpair()
        with other:
            self.process = popen(
                [sys.executable, "-m", "holdfast.deploy.forks", "--line", str(other.fileno())], other.fileno()
            )
        self.open, self.unread = True, b""
        self.forks: dict[int, Fork] = {}
        self.newest: Fork | None = None  # it may have ended when it is seen first

    def start(
        self, name: str, module: str, arguments: list[str], environment: dict[str, str], log: Path
    ) -> Fork:
        """Call `main` of a module in a new process."""
        request = {
            "name": name,
            "module": module,
            "arguments": arguments,
            "environment": environment,
            "log": str(log),
        }
        self.newest, end = None, time.monotonic() + _START
        try:
            self.line.sendall(json.dumps(request).encode() + b"\n")
        except OSError:
            self.open = False
        while self.newest is None:
            if not self.open or time.monotonic() > end:
                self.close()
                raise RunError(f"the process that starts the nodes' processes has ended; see {log.parent}")
            self.read(1.0)
        return self.newest

    def read(self, seconds: float = 0.0) -> None:
        """Take note of what it has reported."""
        if not self.open:
            return
        self.line.settimeout(seconds)
        try:
            more = self.line.recv(1 << 16)
            self.open = bool(more)
        except (BlockingIOError, TimeoutError):
            return
        except OSError:
            self.open = False
            return
        finally:
            self.line.settimeout(None)
        *whole, self.unread = (self.unread + more).split(b"\n")
        for said in map(json.loads, whole):
            if "code" in said:
                self.forks.pop(said["pid"]).returncode = said["code"]
            else:
                self.newest = self.forks[said["pid"]] = Fork(self, said["pid"])

    def close(self) -> None:
        """End the process that forks, and with it the forks that are left."""
        self.open = False
        self.line.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ForkHere:
    """The process that forks, where it is a fork of this one."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, 0 if end is None else os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            else:
                time.sleep(0.05)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def preload() -> None:
    """Load what the forks need, and the parts of experiments."""
    for module in _PRELOADED:
        importlib.import_module(module)
    if _PRELOADED:
        from holdfast.core.registry import parts

        for kind in _PARTS:
            parts(kind)
    gc.collect()
    give_back_memory()
    gc.freeze()  # else every fork would copy all objects when it first looks for garbage


def fork_here(file: int, log: Path) -> ForkHere:
    """Fork the process that forks from this one, which has torch in memory already and one thread."""
    sys.stdout.flush()
    sys.stderr.flush()
    preload()
    own = os.getpid()
    if pid := os.fork():
        return ForkHere(pid)
    try:
        _leave_terminal(log)
        _end_with(own)
        os.umask(0o077)
        line = socket.socket(fileno=os.dup(file))
        os.closerange(3, line.fileno())  # the other end of the line above all, whose closing is the end
        os.closerange(line.fileno() + 1, 4096)
        _prepare()
        serve(line)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def serve(line: socket.socket) -> None:
    """Fork on request until the other side closes the line."""
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    events, unread = selectors.DefaultSelector(), b""
    own = os.getpid()
    events.register(line, selectors.EVENT_READ)
    events.register(woken, selectors.EVENT_READ)
    while True:
        for key, _ in events.select():
            if key.fileobj is woken:
                woken.recv(4096)
                _report_ended(line)
                continue
            more = line.recv(1 << 16)
            if not more:
                return
            *whole, unread = (unread + more).split(b"\n")
            for request in map(json.loads, whole):
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    events.close()
                    for mine in (line, woken, wake):
                        mine.close()
                    _become(request, own)
                line.sendall(json.dumps({"name": request["name"], "pid": pid}).encode() + b"\n")


def _report_ended(line: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        line.sendall(json.dumps({"pid": pid, "code": code}).encode() + b"\n")


def _become(request: dict[str, Any], parent: int) -> None:
    """Be the process that was asked for; never return."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _leave_terminal(Path(request["log"]))
        _end_with(parent)
        if sys.platform == "linux":
            _LIBC.prctl(_NAME, request["name"].encode()[:15])
        os.environ.update(request["environment"])
        random.seed()  # the forks must not draw the same numbers
        sys.argv = [request["module"], *request["arguments"]]
        importlib.import_module(request["module"]).main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _leave_terminal(log: Path) -> None:
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _end_with(parent: int) -> None:
    """Linux: end when the parent does, also if it has ended meanwhile."""
    if sys.platform == "linux":
        _LIBC.prctl(_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(0)


def _prepare() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: it is for the process that asks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    preload()


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m holdfast.deploy.forks", description="Forks the processes of nodes."
    )
    parser.add_argument("--line", required=True, type=int, help="the open socket for requests")
    given = parser.parse_args()
    _prepare()
    serve(socket.socket(fileno=given.line))


if __name__ == "__main__":
    main()
