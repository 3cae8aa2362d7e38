"""What the processes of a federation hold and how long they compute, from /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from holdfast.deploy.processes import Processes
from holdfast.deploy.project import Project

_TICKS = os.sysconf("SC_CLK_TCK")
_NODE = ("node", "trainer", "superexec")
_ROUNDS, _LOOKS = 4, 10  # rounds before a node is measured alone, and how often it is looked at


class Watch:
    """Looks at processes every so many seconds, in a thread."""

    every = 5.0

    def __init__(self, processes: Processes):
        self.processes, self.done = processes, threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self.done.wait(self.every):
            self.look()

    def look(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        self.done.set()
        self.thread.join()


class Memory(Watch):
    """The most that all of them held, and the most that a node shared with no other process."""

    most, further = 0, 0

    def __enter__(self) -> Memory:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def look(self) -> None:
        self.most = max(self.most, sum(held(pid, "Pss") for pid in self.processes.alive()))
        nodes: Counter[str] = Counter()
        for name, process in list(self.processes.started.items()):
            kind = name.rstrip("0123456789")
            if kind in _NODE and kind != name:
                own = held(process.pid, "Private_Clean", "Private_Dirty")
                nodes[name.removeprefix(kind)] += own
        self.further = max(self.further, *nodes.values(), 0)


def held(pid: int, *kinds: str) -> int:
    """Bytes of these kinds that a process holds."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # just gone
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.partition(":")[0] in kinds)


class Work(Watch):
    """CPU seconds from now on, by kind of process; those that live for a moment are counted as far as they
    are seen."""

    every = 0.25

    def __init__(self, processes: Processes):
        super().__init__(processes)
        self.before: dict[tuple[int, str], float] = {}
        self.seen: dict[tuple[int, str], float] = {}
        self.look()
        self.before = dict(self.seen)
        self.thread.start()

    def look(self) -> None:
        for pid in [*self.processes.alive(), os.getpid()]:
            try:
                words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                self.seen[pid, kind_of(pid)] = (int(words[11]) + int(words[12])) / _TICKS
            except OSError:  # just gone
                continue

    def show(self, rounds: int) -> None:
        self.end()
        used: Counter[str] = Counter()
        processes = Counter(kind for _, kind in self.seen)
        for key, seconds in self.seen.items():
            used[key[1]] += (seconds - self.before.get(key, 0.0)) / rounds  # type: ignore[assignment]
        for kind, seconds in used.most_common():
            print(f"    {seconds:6.2f} CPU s a round: {kind} ({processes[kind]} processes)", flush=True)


def kind_of(pid: int) -> str:
    """What a process does, from its command line; forks have names."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    if pid == os.getpid():
        return "up"
    name = Path(f"/proc/{pid}/comm").read_text().strip().rstrip("0123456789")
    if name in ("node", "trainer"):
        return name
    for word in words:
        if word.startswith("holdfast.deploy.") and word != "holdfast.deploy.flower":
            return word.removeprefix("holdfast.deploy.")
        if Path(word).name.startswith("flwr"):
            return Path(word).name
        if word in ("superlink", "supernode", "superexec"):
            return word
    return "others"


def alone(project: Project) -> int:
    """The most that one node holds, started as on a machine of its own."""
    command = [sys.executable, "-m", "holdfast.cli", "federation"]
    server = subprocess.Popen([*command, "up", str(project.path), "--server-only"])
    node = subprocess.Popen([*command, "node", str(project.node(0))])
    most = 0
    try:
        while len(project.ledger().of("round")) < _ROUNDS and node.poll() is None:
            time.sleep(1)
        for _ in range(_LOOKS):
            own = Processes(project.node(0) / "flower", project.logs)
            most = max(most, together({node.pid, *own.alive()}))
            time.sleep(0.7)
    finally:
        for process in (node, server):
            process.send_signal(signal.SIGINT)
            process.wait()
    return most


def together(pids: set[int]) -> int:
    """Bytes that these processes hold together. Memory without a file is shared among them only, so its
    proportional part is exact; of a file the most that one of them has mapped is counted."""
    memory, files = 0.0, Counter[tuple[str, str]]()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
        except OSError:  # just gone
            continue
        where, sizes = ("", ""), dict[str, int]()
        for line in lines:
            first, *rest = line.split()
            if not first.endswith(":"):
                where = (" ".join(rest[4:]), rest[1])
            elif first == "VmFlags:":
                part = sizes["Pss:"]
                if where[0].startswith("/"):
                    files[where] = max(files[where], sizes["Rss:"] - sizes["Anonymous:"])
                    part = part * sizes["Anonymous:"] // max(1, sizes["Rss:"])
                memory += part
            elif rest:
                sizes[first] = int(rest[0]) * 1024
    return int(memory) + sum(files.values())
