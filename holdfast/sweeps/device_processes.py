"""The devices of this machine as an executor: one process for each, which trains in the directory of the
sweep itself, under the locks of the cells."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.engine.workers import usable_cores
from holdfast.sweeps.dispatch import Event
from holdfast.sweeps.units import Unit
from holdfast.sweeps.worker_process import WorkerProcess

Job = Mapping[str, Any]
_GPUS = "CUDA_VISIBLE_DEVICES"
_MOST = 512  # processes on the CPU: a larger number is a mistake
_LOOK = 0.05  # seconds between two looks at the processes


@dataclass
class _Slot:
    """One device, and the process that trains there once there is one."""

    name: str
    environment: dict[str, str]
    process: WorkerProcess | None = None
    attempt: int | None = None


def device_names(text: str, gpus: Callable[[], int]) -> list[str]:
    """The devices that --devices names: 'all' for every GPU, or a list such as 'cuda:0,cuda:1' or 'cpu:2'."""
    if text.strip() == "all":
        if not (many := gpus()):
            raise ConfigError(
                "devices: this machine has no GPU that can train; write cpu:2 for two processes on its CPU"
            )
        return [f"cuda:{number}" for number in range(many)]
    names: list[str] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        kind, _, number = word.partition(":")
        if kind not in ("cpu", "cuda") or not re.fullmatch(r"(cpu|cuda)(:\d{1,4})?", word):
            raise ConfigError(
                f"devices: '{word}' is not a device; write all, or a list such as cuda:0,cuda:1 or cpu:2"
            )
        if kind == "cpu":
            if not 0 < int(number or 1) <= _MOST:
                raise ConfigError(f"devices: '{word}': cpu:N means N processes, from 1 to {_MOST}")
            names += ["cpu"] * int(number or 1)
            continue
        if int(number or 0) >= (many := gpus()):
            there = f"the last one is cuda:{many - 1}" if many else "this machine has no GPU that can train"
            raise ConfigError(f"devices: there is no {word}; {there}")
        names.append(f"cuda:{number or 0}")
    if not names:
        raise ConfigError("devices: name at least one, as in all, cuda:0,cuda:1 or cpu:2")
    if len({name.partition(":")[0] for name in names}) > 1:
        raise ConfigError(
            f"devices: {text} mixes CPU and GPU, and bits would depend on where a cell trains; name one kind"
        )
    return names


@dataclass
class DeviceProcesses:
    """One process for each of these devices."""

    names: list[str]
    job: Callable[[Unit], Job]
    """What a process has to know of a unit."""
    cores: int
    """Threads of each process, where the config names none."""
    _slots: list[_Slot] = field(default_factory=list)

    def __enter__(self) -> DeviceProcesses:
        self._slots = [_Slot(name, _environment(name)) for name in self.names]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for slot in self._slots:
            if slot.process is not None:
                slot.process.end()

    def slots(self) -> int:
        return len(self._slots)

    def start(self, attempt: int, unit: Unit) -> None:
        slot = next(slot for slot in self._slots if slot.attempt is None)
        if slot.process is None:
            slot.process = WorkerProcess(slot.environment, self.cores)
        slot.attempt = attempt
        where = f"{slot.name} (process {slot.process.pid})"
        slot.process.send({**self.job(unit), "id": attempt, "where": where, "cores": self.cores})

    def events(self, within: float) -> list[tuple[int, Event]]:
        deadline = time.monotonic() + within
        while True:
            found = [event for slot in self._slots for event in self._of(slot)]
            if found or time.monotonic() >= deadline:
                return found
            time.sleep(_LOOK)

    def _of(self, slot: _Slot) -> list[tuple[int, Event]]:
        found = []
        while slot.process is not None and not slot.process.events.empty():
            event = slot.process.events.get()
            if slot.attempt is not None:
                found.append((slot.attempt, event))
            if event["event"] in ("done", "error", "lost"):
                slot.attempt = None
            if event["event"] == "lost":
                slot.process.end()
                slot.process = None
        return found

    def stop(self, attempt: int) -> None:
        for slot in self._slots:
            if slot.attempt == attempt:
                if slot.process is not None:
                    slot.process.end()
                slot.process, slot.attempt = None, None


def cores_each(processes: int) -> int:
    return max(1, usable_cores() // processes)


def _environment(name: str) -> dict[str, str]:
    """Let a process see only its GPU, which it calls `cuda`, so that no run depends on which one it is."""
    kind, _, number = name.partition(":")
    if kind == "cpu":
        return {}
    seen = os.environ.get(_GPUS)
    listed = seen.split(",") if seen else None
    return {_GPUS: listed[int(number)] if listed else number}
