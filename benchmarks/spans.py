"""Records what the threads of a process do when, by wrapping functions from outside: the package itself has
no line for it, so nothing is slower where nothing is recorded.

    recorder = Recorder()
    recorder.watch("training", "holdfast.local.fit:fit")

Spans of one thread lie within each other as the calls do; `flat` keeps the innermost."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """One stretch of time of one thread, in seconds of `time.perf_counter`."""

    thread: int
    """The number that the operating system gives it."""
    part: str
    start: float
    end: float


@dataclass
class Recorder:
    """Collects spans. Threads may write at the same time: appending to a list is atomic."""

    spans: list[Span] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    """The names of the threads."""
    missing: list[str] = field(default_factory=list)
    """Functions that were to be watched and that this version of the package does not have."""
    _now: threading.local = field(default_factory=threading.local)

    def watch(self, part: str, place: str, around: Callable[[Any], Any] | None = None) -> None:
        """Record the calls of a function as spans of a part. `place` is "module:name" or
        "module:class.name"; `around` may wrap the function once more."""
        found = _find(place)
        if found is None:
            self.missing.append(place)
            return
        owner, name, work = found

        @wraps(work)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.span(part):
                return work(*args, **kwargs)

        replace_everywhere(owner, name, work, watched if around is None else around(watched))

    def watch_sharing(self, part: str, place: str) -> None:
        """Watch a function that is given work and shares it out over threads: there the work counts as the
        part from which it was handed out, and the rest of the call, which is waiting, as `part`."""
        found = _find(place)
        if found is None:
            self.missing.append(place)
            return
        owner, name, share_out = found

        @wraps(share_out)
        def watched(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            asked_for = self.part()

            def done(*own: Any) -> Any:
                if asked_for is None:
                    return work(*own)
                with self.span(asked_for):
                    return work(*own)

            with self.span(part):
                return share_out(done, *args, **kwargs)

        replace_everywhere(owner, name, share_out, watched)

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        """Record what this thread does within as a span of a part."""
        outer, began = self.part(), time.perf_counter()
        self._now.part = part
        try:
            yield
        finally:
            self._now.part = outer
            self.add(part, began, time.perf_counter())

    def part(self) -> str | None:
        """The part that this thread is in."""
        return getattr(self._now, "part", None)

    def add(self, part: str, start: float, end: float) -> None:
        number = threading.get_native_id()
        if number not in self.names:
            self.names[number] = threading.current_thread().name
        self.spans.append(Span(number, part, start, end))

    def by_thread(self) -> dict[int, list[Span]]:
        found: dict[int, list[Span]] = defaultdict(list)
        for span in self.spans:
            found[span.thread].append(span)
        return dict(found)


def replace_everywhere(owner: Any, name: str, old: Any, new: Any) -> None:
    """Put a function in the place of another, also in modules that have imported it by name."""
    setattr(owner, name, new)
    for module in [m for key, m in sys.modules.items() if key.split(".")[0] == "holdfast"]:
        for known, value in list(vars(module).items()):
            if value is old:
                setattr(module, known, new)


def _find(place: str) -> tuple[Any, str, Any] | None:
    """The owner of a function, its name there, and the function; nothing where it does not exist."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    try:
        owner = importlib.import_module(module)
        for step in owners:
            owner = getattr(owner, step)
        return owner, name, getattr(owner, name)
    except (ImportError, AttributeError):
        return None


def flat(spans: Iterable[Span]) -> list[Span]:
    """The spans of one thread without overlaps: at every moment the innermost one, which began last."""
    out: list[Span] = []
    under: list[Span] = []
    now = -float("inf")

    def until(moment: float) -> None:
        """Write down what happened up to this moment."""
        nonlocal now
        while under:
            top = under[-1]
            stop = min(top.end, moment)
            if stop > now:
                out.append(Span(top.thread, top.part, now, stop))
                now = stop
            if top.end > moment:
                break
            under.pop()
        now = max(now, moment)

    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        until(span.start)
        under.append(span)
    until(float("inf"))
    return out


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as intervals that do not touch each other."""
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((start, end))
    return out


def within(intervals: Sequence[Interval], start: float, end: float) -> float:
    """How many seconds of a stretch of time these intervals, which do not overlap, cover."""
    return sum(max(0.0, min(b, end) - max(a, start)) for a, b in intervals)
