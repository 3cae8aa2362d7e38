"""Draws what the GPU and the threads of the host do when, in a few rounds of FedCAP's Table I (8 rules under
6 attacks, 20 clients, its CIFAR-10 network, generated images), and writes the numbers beside the picture:

    python benchmarks/timeline.py --out FOLDER --device cuda     # clients train; a lane for the GPU
    python benchmarks/timeline.py --out FOLDER                   # on a CPU: noise in place of training
    python benchmarks/timeline.py --out FOLDER --train --experiments 2 --local-epochs 1

FOLDER gets timeline.png, timeline.svg and timeline.json: the share of the rounds in which the device works,
and the seconds of a round by thread and part. On a GPU the lane of the device comes from torch.profiler
(kernels and copies) or, where that records none, from CUDA events around the clients' tasks, which count
gaps within them as work. Spans of the host are recorded by wrapping functions (benchmarks/spans.py)."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from host import ATTACKS, RULES, cell, noise
from spans import Interval, Recorder, Span, flat, merged, replace_everywhere, within
from timeline_picture import draw

from holdfast.experiment import runner
from holdfast.experiment.config import Config, make_config
from holdfast.experiment.runner import RunCallbacks
from holdfast.local import client as local_client
from holdfast.local.plan import REPLAYED
from holdfast.sweeps.runner import results_of, sweep

PARTS = {
    "stacks put together": (
        "holdfast.engine.client_stack:ClientStack.local",
        "holdfast.engine.client_stack:ClientStack._task",
    ),
    "private rows read": (
        "holdfast.engine.simulator:private_rows",
        "holdfast.engine.device_rows:DeviceRows.read",
    ),
    "client half": ("holdfast.engine.client_task:perform",),
    "training": ("holdfast.local.client:fit",),
    "evaluation": ("holdfast.engine.client_task:_measure", "holdfast.evaluation.metrics:of_round"),
    "copied to the host": ("holdfast.core.device:on_host",),
    "replies shared out": ("holdfast.engine.simulator:Simulator._scatter",),
    "attacks": (
        "holdfast.attacks.replies:NewRows.alone",
        "holdfast.attacks.replies:NewRows.together",
        "holdfast.attacks.replies:Written.alone",
        "holdfast.attacks.replies:Written.together",
    ),
    "screening": ("holdfast.core.screening:screen", "holdfast.core.screening:screen_together"),
    "servers": (
        "holdfast.engine.lockstep:RunDriver.turn",
        "holdfast.aggregators.reduction:Reduction.alone",
        "holdfast.aggregators.reduction:Reduction.together",
        "holdfast.aggregators.similarity:Cosines.alone",
        "holdfast.aggregators.similarity:Cosines.together",
        "holdfast.aggregators.similarity:Lengths.alone",
        "holdfast.aggregators.similarity:Lengths.together",
    ),
    "round written down": ("holdfast.experiment.records:prepare_round",),
    "commit": (
        "holdfast.storage.store:write_all",
        "holdfast.storage.write_behind:WriteBehind.begin",
        "holdfast.storage.write_behind:WriteBehind.done",
    ),
    "disk": ("holdfast.storage.store:_wait_for_disk",),
}
"""What is watched: functions by part. Where one calls another, the inner one counts."""
ON_A_GPU = ("client half", "training", "evaluation")
WAITING = "waits for other threads"
DEVICE_WAIT = "waits for the GPU"
OTHER = "everything else"
_LONG = 1e-4  # seconds from which a call of the CUDA runtime counts as waiting
_DEVICE_EVENTS = {"kernel": "GPU computes", "gpu_memcpy": "GPU copies", "gpu_memset": "GPU copies"}


@dataclass
class Rounds:
    """When the rounds began: the first experiment that goes on to a round begins it."""

    begun: dict[int, float] = field(default_factory=dict)

    def watch(self) -> None:
        from holdfast.experiment.loop import Experiment

        work = Experiment._begin_round

        @wraps(work)
        def watched(experiment: Any) -> Any:
            self.begun.setdefault(experiment.run_context.round + 1, time.perf_counter())
            return work(experiment)

        Experiment._begin_round = watched  # type: ignore[method-assign]


# ---- the device


class Device:
    """What a device does when: nothing is recorded on a CPU, where the trainings stand in its place."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    def begin(self) -> None:
        """Called in the main thread before the rounds that are drawn."""

    def end(self) -> None:
        """Called in the main thread when the last round is over."""

    def lanes(self) -> tuple[str, dict[str, list[Interval]]]:
        """The name of the lane and its intervals by what is done."""
        spans = [span for span in self.recorder.spans if span.part in ON_A_GPU]
        found: dict[str, list[Interval]] = defaultdict(list)
        for thread in {span.thread for span in spans}:
            for span in flat(span for span in spans if span.thread == thread):
                found[span.part].append((span.start, span.end))
        return "what a GPU\nwould do", {part: merged(pieces) for part, pieces in found.items()}


class Cuda(Device):
    """A GPU by torch.profiler, and by CUDA events where the profiler sees no kernels."""

    def __init__(self, recorder: Recorder):
        super().__init__(recorder)
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.zero: tuple[float, torch.cuda.Event] | None = None
        self.offset = 0

    def begin(self) -> None:
        self.profiler.start()
        torch.cuda.synchronize()
        first = torch.cuda.Event(enable_timing=True)
        first.record()
        torch.cuda.synchronize()
        self.zero = time.perf_counter(), first
        self.offset = time.time_ns() - time.perf_counter_ns()

    def end(self) -> None:
        if self.zero is not None:
            torch.cuda.synchronize()
            self.profiler.stop()

    def marked(self, part: str) -> Any:
        """Wrap a function so that CUDA events stand around what it starts on the device."""

        def around(work: Any) -> Any:
            @wraps(work)
            def watched(*args: Any, **kwargs: Any) -> Any:
                if self.zero is None:
                    return work(*args, **kwargs)
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                before.record()
                try:
                    return work(*args, **kwargs)
                finally:
                    after.record()
                    self.events.append((part, before, after))

            return watched

        return around

    def lanes(self) -> tuple[str, dict[str, list[Interval]]]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self.profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text())
        for span in waits_of(trace, self.offset):
            self.recorder.spans.append(span)
        busy = device_intervals(trace, self.offset)
        return ("GPU", busy) if busy else ("GPU, between\nCUDA events", self._by_events())

    def _by_events(self) -> dict[str, list[Interval]]:
        assert self.zero is not None
        began, zero = self.zero
        found: dict[str, list[Interval]] = defaultdict(list)
        for part, before, after in self.events:
            times = [began + zero.elapsed_time(event) * 1e-3 for event in (before, after)]
            found[part].append((times[0], times[1]))
        return {part: merged(intervals) for part, intervals in found.items()}


def device_intervals(trace: Mapping[str, Any], offset: int) -> dict[str, list[Interval]]:
    """When a GPU computes and when it copies, from a trace of torch.profiler, in seconds of `perf_counter`;
    `offset` is how many nanoseconds the clock of the day is ahead of it."""
    found: dict[str, list[Interval]] = defaultdict(list)
    for event in trace["traceEvents"]:
        kind = _DEVICE_EVENTS.get(str(event.get("cat")).lower())
        if kind is not None and event.get("ph") == "X":
            start = _began(trace, event, offset)
            found[kind].append((start, start + event["dur"] * 1e-6))
    return {kind: merged(found[kind]) for kind in ("GPU computes", "GPU copies") if kind in found}


def waits_of(trace: Mapping[str, Any], offset: int) -> list[Span]:
    """When threads of the host waited for the GPU: in calls of the CUDA runtime that return only when the GPU
    is done."""
    found = []
    for event in trace["traceEvents"]:
        name, long = str(event.get("name")), float(event.get("dur", 0)) * 1e-6
        if str(event.get("cat")).lower() not in ("cuda_runtime", "cuda_driver") or long < _LONG:
            continue
        if "Synchronize" in name or "Memcpy" in name:
            start = _began(trace, event, offset)
            found.append(Span(int(event["tid"]), DEVICE_WAIT, start, start + long))
    return found


def _began(trace: Mapping[str, Any], event: Mapping[str, Any], offset: int) -> float:
    """The begin of an event; in whole nanoseconds as far as possible, because the clock of the day is a large
    number."""
    return (int(trace.get("baseTimeNanoseconds", 0)) - offset) * 1e-9 + event["ts"] * 1e-6


# ---- the run


def watch_all(recorder: Recorder, device: Device) -> None:
    """Put the timers in place. They stay: a process draws one picture."""
    for part, places in PARTS.items():
        for place in places:
            marks = isinstance(device, Cuda) and part in ON_A_GPU
            recorder.watch(part, place, device.marked(part) if marks else None)
    recorder.watch_sharing(WAITING, "holdfast.engine.host_threads:each")


def cells(asked: argparse.Namespace) -> list[tuple[str, Config]]:
    """The first experiments of the table, all rules under one attack after the other."""
    pairs = [(rule, attack) for attack in ATTACKS for rule in RULES][: asked.experiments]
    plan = asked.plan or ("compiled-vmap" if asked.device == "cuda" else "vmap")
    made = []
    for rule, attack in pairs:
        config = cell(rule, attack, asked.rounds).model_dump(exclude_unset=True)
        config["train"] |= {"local_epochs": asked.local_epochs}
        # 300 images a client, as in the table
        config["data"]["options"] |= {"samples": 6100}
        config["engine"] |= {"plan": plan, "device": asked.device}
        if plan in REPLAYED:
            config["engine"].pop("memory")
        made.append((f"{rule} {attack}", make_config(config)))
    return made


def record(asked: argparse.Namespace) -> tuple[Recorder, Device, Rounds]:
    """Run the rounds and return what was recorded."""
    recorder, rounds = Recorder(), Rounds()
    device = Cuda(recorder) if asked.device == "cuda" else Device(recorder)
    if not asked.train and asked.device == "cpu":
        replace_everywhere(local_client, "fit", local_client.fit, noise)
        if asked.threads > 1:
            runner._host_threads = lambda *_: asked.threads  # type: ignore[assignment]
    rounds.watch()
    started = [False]

    def moved(experiment: Any) -> None:
        # one round earlier than what is drawn, because starting the profiler takes its time
        if not started[0] and experiment.run_context.round >= shown_rounds(asked)[0] - 1:
            started[0] = True
            device.begin()

    watch_all(recorder, device)
    with tempfile.TemporaryDirectory() as folder:
        results_of(sweep(cells(asked), Path(folder) / "sweep", RunCallbacks(moved=moved)))
        device.end()
    return recorder, device, rounds


# ---- the numbers


def lane_name(thread: str) -> str:
    """A thread in words."""
    if thread == threading.main_thread().name:
        return "main thread"
    pool, _, number = thread.rpartition("_")
    if pool == "holdfast-hand" and number.isdigit():
        return f"host thread {int(number) + 1}"
    return "saving thread" if pool == "holdfast-commit" else thread


def host_lanes(recorder: Recorder, start: float, end: float) -> dict[str, list[Span]]:
    """The threads that did something in a stretch of time, without overlaps; the main thread first, and with
    the time for which there is no name."""
    lanes = {}
    for number, spans in recorder.by_thread().items():
        name = lane_name(recorder.names.get(number, f"thread {number}"))
        inside = [
            Span(number, s.part, max(s.start, start), min(s.end, end))
            for s in spans
            if s.end > start and s.start < end
        ]
        if name == "main thread":
            inside.append(Span(number, OTHER, start, end))
        if inside:
            lanes[name] = flat(inside)
    order = sorted(lanes, key=lambda name: (name != "main thread", "host" not in name, len(name), name))
    return {name: lanes[name] for name in order}


def numbers(
    asked: argparse.Namespace,
    lanes: Mapping[str, list[Span]],
    device: tuple[str, Mapping[str, list[Interval]]],
    edges: Mapping[int, Interval],
    missing: list[str],
) -> dict[str, Any]:
    """Everything that the picture shows, as numbers."""
    busy = merged([piece for pieces in device[1].values() for piece in pieces])
    seconds: dict[str, dict[str, float]] = {}
    for name, spans in lanes.items():
        spent: dict[str, float] = defaultdict(float)
        for span in spans:
            spent[span.part] += (span.end - span.start) / len(edges)
        seconds[name] = {part: round(value, 4) for part, value in sorted(spent.items(), key=lambda x: -x[1])}
    start, end = min(a for a, _ in edges.values()), max(b for _, b in edges.values())
    return {
        "experiments": asked.experiments,
        "device": asked.device,
        "device_name": torch.cuda.get_device_name() if asked.device == "cuda" else "CPU",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "training": "real" if asked.train or asked.device == "cuda" else "noise in its place",
        "rounds": {str(number): round(b - a, 4) for number, (a, b) in edges.items()},
        "device_lane": device[0].replace("\n", " "),
        "device_works": round(within(busy, start, end) / (end - start), 4),
        "device_works_by_round": {
            str(number): round(within(busy, a, b) / (b - a), 4) for number, (a, b) in edges.items()
        },
        "device_seconds_of_a_round": {
            kind: round(within(pieces, start, end) / len(edges), 4) for kind, pieces in device[1].items()
        },
        "seconds_of_a_round": seconds,
        "not_found": missing,
    }


def shown_rounds(asked: argparse.Namespace) -> range:
    """The rounds that are drawn."""
    end = asked.rounds + asked.evaluation
    return range(end - asked.show, end)


def round_edges(rounds: Rounds, shown: range) -> dict[int, Interval]:
    """Begin and end of the rounds that are drawn: a round ends where the next one begins. After the last
    round of a run, the method's `finish` counts as one."""
    return {number: (rounds.begun[number], rounds.begun[number + 1]) for number in shown}


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path, required=True, help="folder for the picture and its numbers")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--experiments", type=int, default=len(RULES) * len(ATTACKS))
    options.add_argument("--rounds", type=int, default=5, help="all rounds that run; the last is evaluated")
    options.add_argument("--show", type=int, default=3, help="how many of those before the last are drawn")
    options.add_argument("--evaluation", action="store_true", help="draw the last round, too")
    options.add_argument("--train", action="store_true", help="really train on a CPU, too")
    options.add_argument("--local-epochs", type=int, default=5)
    options.add_argument("--plan", help="compiled-vmap on a GPU, vmap on a CPU, unless given")
    options.add_argument(
        "--threads",
        type=int,
        default=os.cpu_count() or 1,
        help="host threads, where noise stands for training",
    )
    asked = options.parse_args()
    if asked.show < 1 or shown_rounds(asked)[0] < 2:
        options.error("--show must be at least 1, and leave out the first round of --rounds")
    recorder, device, rounds = record(asked)
    lane = device.lanes()
    edges = round_edges(rounds, shown_rounds(asked))
    start, end = min(a for a, _ in edges.values()), max(b for _, b in edges.values())
    lanes = host_lanes(recorder, start, end)
    found = numbers(asked, lanes, lane, edges, recorder.missing)
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "timeline.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(asked.out, found, lanes, lane, edges)
    print(json.dumps(found, indent=1), flush=True)


if __name__ == "__main__":
    main()
