"""Send committed rounds to trackers, as they are committed.

A tracker begins before the first round, in the main thread; after that a separate thread sends the rounds, so
that a slow server does not delay the experiment or change its timings. The last round that each tracker
received is stored beside the run, in tracking.json: a resumed run continues in the same place, and rounds
that were not sent before a kill are sent then. The first exception of a tracker is reported once, and that
tracker is switched off for the rest of the session.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from holdfast.core.errors import ConfigError, suggest
from holdfast.core.files import as_json, replace_file
from holdfast.core.reading import is_whole, read_json
from holdfast.engine.ranks import follows
from holdfast.experiment.loop import Experiment
from holdfast.experiment.runner import RunCallbacks, Say
from holdfast.tracking.base import Figures, KnownRun, Tracker, harmless, numbers, settings

FILE = "tracking.json"
TRACKERS = {"tensorboard": "TensorBoard", "mlflow": "MLflow", "wandb": "WeightsAndBiases"}
"""Trackers by name, which is also the name of the package it needs: the class in the module of that name
beside this one."""
_PATIENCE = 60.0  # seconds that a finished experiment waits for its trackers
Make = Callable[[], Tracker]


@contextmanager
def tracked(track: Sequence[str | Make], watch: RunCallbacks | None = None) -> Iterator[RunCallbacks]:
    """Yield a watch that also informs these trackers. Of several processes that run an experiment together,
    the first informs them."""
    watch = watch or RunCallbacks()
    if not track or follows():
        yield watch
        return
    tracking = Tracking(chosen(track), watch.say)
    try:
        yield tracking.beside(watch)
    finally:
        tracking.close()


def chosen(track: Sequence[str | Make]) -> dict[str, Make]:
    """Return trackers by name, or classes of the user; a missing package is reported before the run
    starts."""
    if isinstance(track, str):
        raise ConfigError(f'track: give a list, ["{track}"]')
    out: dict[str, Make] = {}
    for one in track:
        if not isinstance(one, str):
            out[getattr(one, "__name__", type(one).__name__)] = one
            continue
        if one not in TRACKERS:
            raise ConfigError(f"track: unknown tracker '{one}'{suggest(one, TRACKERS)}")
        if not _installed(one):
            raise ConfigError(
                f"track: {one} is not installed; pip install 'holdfast[{one}]', or pip install {one}"
            )
        out[one] = partial(_made, one)
    return out


def _made(name: str) -> Tracker:
    made: Tracker = getattr(importlib.import_module(f"holdfast.tracking.{name}"), TRACKERS[name])()
    return made


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module without a spec is installed all the same
        return True


@dataclass
class _TrackedRun:
    """One experiment: its trackers, and the last round that each received."""

    folder: Path
    experiment: Experiment
    record: dict[str, dict[str, Any]]
    trackers: dict[str, Tracker] = field(default_factory=dict)
    sent: int = 0
    ended: bool = False


class Tracking:
    def __init__(self, makers: Mapping[str, Make], say: Say):
        self.makers, self.say = dict(makers), say
        self.off: set[str] = set()
        self.runs: dict[int, _TrackedRun] = {}
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="holdfast-tracking", daemon=True)
        self._thread.start()

    def beside(self, watch: RunCallbacks) -> RunCallbacks:
        def planned(experiments: list[Experiment]) -> None:
            for experiment in experiments:
                self.begin(experiment)
            watch.planned(experiments)

        def moved(experiment: Experiment) -> None:
            watch.moved(experiment)
            self.moved(experiment)

        return RunCallbacks(watch.say, moved, planned)

    def begin(self, experiment: Experiment) -> None:
        """Open the experiment in every tracker, and send the rounds that a known run has missed."""
        folder = experiment.out
        tracked_run = _TrackedRun(
            folder, experiment, _read_record(folder), sent=experiment.store.round() or 0
        )
        over = (folder / "result.json").exists()
        for name, make in self.makers.items():
            known = tracked_run.record.get(name)
            if not (over and known is not None and known.get("ended")):
                self._guarded(name, folder, partial(self._open, tracked_run, name, make))
        if tracked_run.trackers:
            self.runs[id(experiment)] = tracked_run

    def _open(self, tracked_run: _TrackedRun, name: str, make: Make) -> None:
        tracker, experiment = make(), tracked_run.experiment
        record = tracked_run.record.get(name)
        known = None if record is None else KnownRun(str(record["id"]), int(record["round"]))
        found = tracker.begin(
            settings(experiment.config.plain()), tracked_run.folder, experiment.label, known
        )
        tracked_run.trackers[name] = tracker
        self._note(tracked_run, name, id=found, round=0 if known is None else known.round, ended=False)
        if len(self.runs) == 0:
            self.say(f"{name}: {tracker.where}")
        for round in range(tracked_run.record[name]["round"] + 1, tracked_run.sent + 1):
            self._later(tracked_run, name, partial(self._tell_round, tracked_run, name, round))

    def moved(self, experiment: Experiment) -> None:
        """Send newly committed rounds, and the end; called after every exchange."""
        tracked_run = self.runs.get(id(experiment))
        if tracked_run is None or tracked_run.ended:
            return
        for round in range(tracked_run.sent + 1, experiment.committed + 1):
            tracked_run.sent = round
            for name in tracked_run.trackers:
                self._later(tracked_run, name, partial(self._tell_round, tracked_run, name, round))
        if experiment.finished is not None:
            self._end(tracked_run, numbers(experiment.finished["final"]))

    def close(self) -> None:
        """Wait, for a limited time, until everything is sent; end unfinished runs as stopped."""
        for tracked_run in self.runs.values():
            if not tracked_run.ended:
                self._end(tracked_run, None)
        self._jobs.put(None)
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            self.say(
                f"trackers: still busy after {_PATIENCE:.0f} s, stopped waiting; `holdfast resume"
                " --track` sends them what is missing"
            )

    def _end(self, tracked_run: _TrackedRun, final: Figures | None) -> None:
        tracked_run.ended = True
        for name in tracked_run.trackers:
            self._later(tracked_run, name, partial(self._tell_end, tracked_run, name, final))

    def _tell_round(self, tracked_run: _TrackedRun, name: str, round: int) -> None:
        part = tracked_run.experiment.store.part(round) or {}
        seconds = {f"seconds/{of}": value for of, value in part.get("seconds", {}).items()}
        tracked_run.trackers[name].round(round, numbers({**part.get("metrics", {}), **seconds}))
        self._note(tracked_run, name, round=round)

    def _tell_end(self, tracked_run: _TrackedRun, name: str, final: Figures | None) -> None:
        tracked_run.trackers[name].end(final)
        self._note(tracked_run, name, ended=final is not None)

    def _note(self, tracked_run: _TrackedRun, name: str, **news: Any) -> None:
        tracked_run.record[name] = {**tracked_run.record.get(name, {}), **news}
        replace_file(tracked_run.folder / FILE, as_json(tracked_run.record))

    def _later(self, tracked_run: _TrackedRun, name: str, action: Callable[[], None]) -> None:
        self._jobs.put(partial(self._guarded, name, tracked_run.folder, action))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _guarded(self, name: str, folder: Path, action: Callable[[], None]) -> None:
        """Run an action of a tracker; whatever it raises, short of Ctrl-C, the experiment continues."""
        if name in self.off:
            return
        try:
            action()
        except (Exception, SystemExit) as error:
            self.off.add(name)
            if folder.exists():  # otherwise the run itself failed, which is reported elsewhere
                self.say(f"{name} failed and is switched off, the run continues: {_in_a_line(error)}")


def _read_record(folder: Path) -> dict[str, dict[str, Any]]:
    """Read what earlier sessions sent; a damaged file is ignored, and everything is sent again."""
    try:
        found = read_json(folder / FILE) or {}
    except Exception:
        return {}
    return {name: record for name, record in found.items() if _is_record(record)}


def _is_record(record: Any) -> bool:
    """Return whether this is the record of a tracker: the id of the run, and the last round sent."""
    return (
        isinstance(record, dict)
        and isinstance(record.get("id"), (str, int))
        and is_whole(record.get("round"))
    )


def _in_a_line(error: BaseException) -> str:
    message = harmless(" ".join(str(error).split()))
    return f"{type(error).__name__}: {message[:197] + '...' if len(message) > 200 else message}".rstrip(": ")
