"""Processes of a soak: commands that are started, and everything they have started themselves, found by a
mark in its environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import holdfast

MARK = "HOLDFAST_SOAK"
WORKER = "worker"
_PROGRAMS = {
    "flwr-serverapp": "ServerApp",
    "holdfast.deploy.proxy": "proxy",
}
_FLOWER = {
    "superlink": "SuperLink",
    "superexec": "SuperExec",
}  # of holdfast.deploy.flower


class Command:
    """`holdfast ...` in a process of its own, and what it says."""

    def __init__(self, mark: str, folder: Path, *arguments: object):
        (folder / "said").mkdir(exist_ok=True)
        self.said = folder / "said" / f"{time.monotonic_ns()}-{arguments[0]}.txt"
        self.began = time.monotonic()
        own = {
            "PYTHONPATH": str(Path(holdfast.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(temporary(folder)),
            MARK: mark,
        }
        environment = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"} | own
        with open(self.said, "wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.cli", *map(str, arguments)],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def text(self) -> str:
        return self.said.read_text(errors="replace")

    @property
    def last_line(self) -> str:
        return (self.text.strip().splitlines() or [""])[-1]

    @property
    def is_one_line_error(self) -> bool:
        return self.last_line.startswith("error: ") and "Traceback" not in self.text

    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, seconds: float) -> int | None:
        """Its exit code; None when it has not ended by then."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def temporary(folder: Path) -> Path:
    """Where all processes put their temporary files and sockets, and nothing else lies. The path of a socket
    must be short."""
    (folder / "tmp").mkdir(exist_ok=True)
    return folder / "tmp"


def marked(mark: str) -> dict[int, str]:
    """All living processes of the soak, by role."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = role(int(folder.name))
        except OSError:  # another user's, or just gone
            continue
    return {pid: what for pid, what in found.items() if what}


def role(pid: int) -> str:
    """What a process is, from its command line and that of its parent; nothing for one that is gone."""
    arguments = _arguments(pid)
    if not arguments:
        return ""
    for program, name in _PROGRAMS.items():
        if any(argument == program or argument.endswith(f"/{program}") for argument in arguments[:4]):
            return name
    if "holdfast.deploy.flower" in arguments:
        return _FLOWER.get(arguments[arguments.index("holdfast.deploy.flower") + 1], "helper")
    if "holdfast.deploy.forks" in arguments:  # its forks have its command line, and names of their own
        name = _name(pid)
        return (
            "SuperNode" if name.startswith("node") else "trainer" if name.startswith("trainer") else "forks"
        )
    if "holdfast.cli" in arguments:
        return (
            WORKER
            if arguments == _arguments(parent(pid))
            else "up"
            if "federation" in arguments
            else "the process"
        )
    return "helper"  # Flower's own command line, and what git or uv may start


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return 0


def own_memory(pid: int) -> int:
    """Bytes that a process holds and does not share with a file."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def all_gone(mark: str, seconds: float = 20.0) -> dict[int, str]:
    """Who is still there after so many seconds."""
    end = time.monotonic() + seconds
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    return left
