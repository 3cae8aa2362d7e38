"""A Ray cluster as an executor: each unit is a task with the CPUs or the GPU that it needs.

Ray pickles what crosses within the cluster, which therefore has to be trusted. What Holdfast hands to it is
bytes and plain data, and what comes back is checked (receiving.py). A cluster that is started here listens on
the loopback address only and has no dashboard."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from holdfast.core.errors import ConfigError, RunError, in_print
from holdfast.engine.workers import usable_cores
from holdfast.sweeps.dispatch import Event
from holdfast.sweeps.ray_task import Plugin, SentSamples, train_unit
from holdfast.sweeps.units import Unit

LOCAL = "local"
_REACH = 10.0  # seconds to reach a cluster's address
_HEALTH = 30.0  # seconds for a cluster to say that it is well
_FETCH = 120.0  # seconds to fetch what a worker has sent
_LOOPBACK = "127.0.0.1"
_OWN_ADDRESSES = ("127.", "localhost:", "[::1]:")
_LOCAL_SETTINGS = {
    # without it Ray replaces the loopback address by one that other machines can reach
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass(frozen=True)
class Need:
    """What a unit needs of a machine."""

    cpus: int
    gpus: int


@dataclass(frozen=True)
class Parcel:
    """What a task gets."""

    spec: dict[str, Any]
    block: bytes
    plugins: list[Plugin]
    samples: list[SentSamples]
    need: Need


@contextlib.contextmanager
def connected(address: str, cpus: int | None = None) -> Iterator[Any]:
    """Ray, connected to a cluster that is started here (with so many CPUs) and ends with the block, or to one
    at an address, or as the program that calls has connected it already."""
    ray = _imported(local=address == LOCAL or address.startswith(_OWN_ADDRESSES))
    if ray.is_initialized():
        yield ray
        return
    _silence(ray)
    _start(ray, cpus or usable_cores()) if address == LOCAL else _connect(ray, address)
    try:
        yield ray
    finally:
        ray.shutdown()


def _imported(local: bool) -> Any:
    """Ray. What it reads when it is imported is set before, or in it where it was imported already; its
    processes inherit the environment."""
    if local:
        for name, value in _LOCAL_SETTINGS.items():
            os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise ConfigError("ray: Ray is not installed; pip install 'holdfast[ray]'") from None
    constants: Any = getattr(getattr(ray, "_private", None), "ray_constants", None)
    if local and hasattr(constants, "ENABLE_RAY_CLUSTER"):
        constants.ENABLE_RAY_CLUSTER = False
    return ray


def _silence(ray: Any) -> None:
    """Ray prints pages about a machine that is lost to standard output; one line of ours says it."""
    worker: Any = getattr(getattr(ray, "_private", None), "worker", None)
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *args, **kwargs: None


def _start(ray: Any, cpus: int) -> None:
    ray.init(
        address=LOCAL,
        include_dashboard=False,
        _node_ip_address=_LOOPBACK,
        num_cpus=cpus,
        log_to_driver=False,
        logging_level="ERROR",
    )
    reached = {node["NodeManagerAddress"] for node in ray.nodes()}
    if reached != {_LOOPBACK}:
        ray.shutdown()
        names = " ".join(f"{name}={value}" for name, value in _LOCAL_SETTINGS.items())
        raise RunError(
            f"ray: the local cluster listens on {', '.join(sorted(reached))} and not on {_LOOPBACK} only,"
            f" because Ray was imported before; set {names} before Python starts"
        )


def _connect(ray: Any, address: str) -> None:
    host, _, port = address.rpartition(":")
    if address.startswith("ray://"):
        raise ConfigError(
            f"ray: {address} is an address of Ray Client; start the sweep on a machine of the cluster and"
            " give HOST:PORT, or auto"
        )
    if address != "auto":
        if not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise ConfigError(
                f"ray: '{address}' is not an address; write HOST:PORT of a cluster's head node, auto for the"
                " cluster of this machine, or nothing for one of its own"
            )
        try:
            socket.create_connection((host.strip("[]"), int(port)), _REACH).close()
        except OSError as error:
            raise ConfigError(f"ray: nothing answers at {address}: {error.strerror or error}") from None
        _check_health(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
        said = in_print(" ".join(str(error).split()))[:300]
        raise ConfigError(
            f"ray: cannot use the cluster at {address}: {said}; this machine has to be one of the cluster"
            " (`ray start --address=HOST:PORT`)"
        ) from None


def _check_health(address: str) -> None:
    """Whether a Ray cluster answers: to something else, Ray itself would try to connect for minutes."""
    line = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        done = subprocess.run(line, capture_output=True, timeout=_HEALTH).returncode
    except subprocess.TimeoutExpired:
        done = None
    if done != 0:
        raise ConfigError(
            f"ray: what answers at {address} is no Ray cluster, or not well"
            + (f" (no answer to `ray health-check` for {_HEALTH:.0f} s)" if done is None else "")
        )


@dataclass
class RayCluster:
    """The tasks of one sweep on a cluster."""

    ray: Any
    parcel: Callable[[Unit], Parcel]
    need: Need
    """What a unit needs that has not begun."""
    _tasks: dict[Any, int] = field(default_factory=dict)
    """The attempt of each task that has not ended."""

    def __enter__(self) -> RayCluster:
        if not self.slots():
            what = "GPU" if self.need.gpus else f"machine with {self.need.cpus} CPUs"
            raise ConfigError(f"ray: the cluster has no {what}, which a unit of this sweep needs")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for attempt in list(self._tasks.values()):
            self.stop(attempt)

    def slots(self) -> int:
        """How many units fit on the machines that the cluster has now."""
        found = 0
        for node in self.ray.nodes():
            has = node["Resources"] if node["Alive"] else {}
            fit = [int(has.get("CPU", 0) // self.need.cpus)]
            fit += [int(has.get("GPU", 0) // self.need.gpus)] if self.need.gpus else []
            found += min(fit)
        return found

    def start(self, attempt: int, unit: Unit) -> None:
        parcel = self.parcel(unit)
        remote = self.ray.remote(
            num_cpus=parcel.need.cpus,
            num_gpus=parcel.need.gpus,
            num_returns="streaming",
            max_retries=0,
            scheduling_strategy="SPREAD",
        )(train_unit)
        spec = json.dumps({**parcel.spec, "id": attempt}).encode()
        task = remote.remote(spec, parcel.block, parcel.plugins, parcel.samples)
        self._tasks[task] = attempt

    def events(self, within: float) -> list[tuple[int, Event]]:
        found: list[tuple[int, Event]] = []
        while self._tasks:
            ready = self._ready(0 if found else within)
            if not ready:
                break
            attempt = self._tasks[ready[0]]
            event = self._next(ready[0])
            if event["event"] in ("done", "error", "lost"):
                self._tasks.pop(ready[0], None)
            found.append((attempt, event))
        return found

    def _ready(self, within: float) -> list[Any]:
        """A task that has told something, if there is one within so many seconds."""
        try:
            ready, _ = self.ray.wait(list(self._tasks), num_returns=1, timeout=within, fetch_local=False)
        except self.ray.exceptions.RayError as error:
            raise RunError(
                f"ray: the cluster is lost ({_reason(error)}); what came back is saved, and the same command"
                " continues"
            ) from None
        return list(ready)

    def _next(self, task: Any) -> Event:
        try:
            told, files = self.ray.get(next(task), timeout=_FETCH)
        except StopIteration:
            return {"event": "lost", "reason": "its task ended without a result"}
        except self.ray.exceptions.RayError as error:
            return {"event": "lost", "reason": _reason(error)}
        event: Event = json.loads(told)
        return {**event, "files": files} if event["event"] == "files" else event

    def stop(self, attempt: int) -> None:
        for task, number in list(self._tasks.items()):
            if number == attempt:
                del self._tasks[task]
                with contextlib.suppress(Exception):  # it may have ended
                    self.ray.cancel(task, force=True)


def _reason(error: Exception) -> str:
    """Ray's errors have many lines, of which the first says what happened."""
    lines = [line.strip() for line in in_lines(str(error)) if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def in_lines(text: str) -> list[str]:
    return [in_print(line) for line in text.splitlines()]
