"""Forecast what a run or a sweep costs from a measurement of a few short rounds (measure.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

import numpy as np

from holdfast.experiment.loop import Experiment
from holdfast.forecast.participation import ExpectedParticipation
from holdfast.forecast.short_rounds import TimedExchange
from holdfast.local.plan import Plan


@dataclass(frozen=True)
class GroupPlan:
    """Cells whose clients are trained as one computation. `rows` models are trained in a round; `stack` of
    them take a step together (in each worker)."""

    cells: tuple[str, ...]
    plan: str
    precision: str
    rows: int
    stack: int
    workers: int
    threads: int
    client_steps: float
    microseconds: float | None


@dataclass(frozen=True)
class Seconds:
    """`start`: building, choosing a plan, compiling; `server`: server rules, and waiting for the disk."""

    start: float
    training: float
    evaluation: float
    server: float

    @property
    def total(self) -> float:
        return self.start + self.training + self.evaluation + self.server


@dataclass(frozen=True)
class Memory:
    """Peaks in bytes: resident sets of the process and its workers; tensors on the GPU, where there is
    one."""

    host: int
    device: int | None


@dataclass(frozen=True)
class Disk:
    """Bytes of all files at the end, divided into what is written once, for each round, and for private
    rows."""

    total: int
    once: int
    rounds: int
    private: int
    files: int


@dataclass(frozen=True)
class Forecast:
    device: str
    cells: tuple[str, ...]
    groups: tuple[GroupPlan, ...]
    client_steps: float
    seconds: Seconds
    memory: Memory
    disk: Disk

    def plain(self) -> dict[str, Any]:
        """Return the forecast as plain data for JSON."""
        content = asdict(self)
        content["seconds"]["total"] = self.seconds.total
        return content


@dataclass(frozen=True)
class MeasuredRounds:
    """What was measured of experiments that ran together for a few rounds."""

    experiments: Sequence[Experiment]
    real_rounds: Sequence[int]
    real_every: Sequence[int]
    last: int
    """The last round; what came after it was the methods' finish."""
    timed: Sequence[TimedExchange]
    began: dict[int, float]
    called: float
    ended: float
    participations: Sequence[ExpectedParticipation]
    plans: Sequence[Plan]
    threads: int


@dataclass(frozen=True)
class _ExchangeTotals:
    """All exchanges of one kind in the whole run: steps of all clients, and seconds."""

    group: tuple[Any, ...]
    evaluation: bool
    steps: float
    seconds: float


def forecast_seconds(seen: MeasuredRounds) -> tuple[Seconds, list[_ExchangeTotals]]:
    kinds = [_kind(seen, timed) for timed in _by_kind(seen.timed)]
    walls = {r: seen.began[r + 1] - seen.began[r] for r in range(1, seen.last)}
    in_spans = {
        r: sum(span.seconds for span in seen.timed if span.round == r) for r in range(1, seen.last + 1)
    }
    rest = median(max(0.0, walls[r] - in_spans[r]) for r in range(2, seen.last))
    rounds = mean(seen.real_rounds)
    usual = median(in_spans[r] for r in range(3, seen.last + 1, 2)) + rest
    start = seen.began[1] - seen.called + max(0.0, walls[1] - usual)
    # figures are collected, workers end
    end = max(0.0, seen.ended - seen.began[seen.last] - in_spans[seen.last] - rest)
    end -= min(end, sum(span.seconds for span in seen.timed if span.round > seen.last))
    training = sum(kind.seconds for kind in kinds if not kind.evaluation)
    return (
        Seconds(start, training, sum(kind.seconds for kind in kinds if kind.evaluation), rest * rounds + end),
        kinds,
    )


def evaluations(rounds: int, every: int) -> int:
    return -(-rounds // every)


def _by_kind(timed: Iterable[TimedExchange]) -> list[list[TimedExchange]]:
    found: dict[Any, list[TimedExchange]] = {}
    for span in timed:
        found.setdefault((span.group, span.evaluation), []).append(span)
    return list(found.values())


def _kind(seen: MeasuredRounds, timed: list[TimedExchange]) -> _ExchangeTotals:
    """Extrapolate exchanges of one kind: in every round, or in every evaluation, seconds = fixed + slope *
    rows."""
    first = timed[0]
    members = [i for i, e in enumerate(seen.experiments) if e.run_context.group(first.task) == first.group]
    steady = sorted({span.round for span in timed if 2 <= span.round <= seen.last})
    after = [span for span in timed if span.round > seen.last]

    def total(round: int, name: str) -> float:
        return sum(getattr(span.work, name) for span in timed if span.round == round)

    points = [(total(r, "rows"), sum(span.seconds for span in timed if span.round == r)) for r in steady]
    fixed, slope = line(points)
    times = mean(
        evaluations(seen.real_rounds[i], seen.real_every[i]) if first.evaluation else seen.real_rounds[i]
        for i in members
    )
    growth = 1.0 if first.evaluation or not steady else _growth(seen, members, steady, times)
    rows, steps = (
        mean([total(r, name) for r in steady] or [0.0]) * times * growth
        for name in ("rows_in_full", "steps_in_full")
    )
    finish = sum(span.seconds + slope * (span.work.rows_in_full - span.work.rows) for span in after)
    steps += sum(span.work.steps_in_full for span in after)
    return _ExchangeTotals(first.group, first.evaluation, steps, fixed * times + slope * rows + finish)


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (fixed, slope) of a line through the medians of the short and of the long rounds: another
    process may have slowed some."""
    if not points:
        return 0.0, 0.0
    middle = mean((min(x for x, _ in points), max(x for x, _ in points)))
    low, high = [p for p in points if p[0] < middle], [p for p in points if p[0] >= middle]
    x_high, y_high = (median(p[axis] for p in high) for axis in (0, 1))
    if low and x_high:
        x_low, y_low = (median(p[axis] for p in low) for axis in (0, 1))
        slope = (y_high - y_low) / (x_high - x_low)
        if 0 < slope <= y_high / x_high:
            return y_high - slope * x_high, slope
    return (0.0, y_high / x_high) if x_high else (y_high, 0.0)


def _growth(seen: MeasuredRounds, members: list[int], steady: list[int], times: float) -> float:
    """Return how much more the cohorts of an average round of the run train than those of the measured
    rounds."""
    discarding = sum(float(seen.participations[i].steps[r - 1]) for i in members for r in steady) / len(
        steady
    )
    planned = sum(float(seen.participations[i].steps[: seen.real_rounds[i]].sum()) for i in members)
    return planned / (discarding * times) if discarding else 1.0


def group_plans(seen: MeasuredRounds, kinds: Sequence[_ExchangeTotals], device: str) -> tuple[GroupPlan, ...]:
    found: dict[Any, list[int]] = {}
    for place, experiment in enumerate(seen.experiments):
        found.setdefault(experiment.run_context.group("train")[1:], []).append(place)
    out = []
    for group, members in found.items():
        plan = seen.plans[members[0]]
        mine = [kind for kind in kinds if not kind.evaluation and kind.group[1:] == group]
        steps, seconds = sum(kind.steps for kind in mine), sum(kind.seconds for kind in mine)
        of = [seen.experiments[i] for i in members]
        rows = sum(e.participation.cohort_size() * e.rule.models_per_client for e in of)
        stack = min(-(-rows // plan.workers), plan.together) if plan.stacked else 1
        precision = "fp32" if device == "cpu" and plan.precision == "tf32" else plan.precision
        out.append(
            GroupPlan(
                tuple(e.label for e in of),
                plan.name,
                precision,
                rows,
                stack,
                plan.workers,
                seen.threads,
                steps,
                seconds / steps * 1e6 if steps else None,
            )
        )
    return tuple(out)


def forecast_disk(seen: MeasuredRounds, others: int, other_files: int) -> Disk:
    """Forecast the bytes on disk. `others`: bytes of what a sweep writes beside its cells."""
    cells = np.array([_cell_on_disk(seen, i) for i in range(len(seen.experiments))]).sum(axis=0)
    once, rounds, private, files = (int(value) for value in cells)
    return Disk(once + others + rounds + private, once + others, rounds, private, files + other_files)


def _cell_on_disk(seen: MeasuredRounds, place: int) -> tuple[float, float, float, float]:
    """Return bytes written once, in all rounds, for private rows; and the number of files."""
    folder, expected_participation = seen.experiments[place].out, seen.participations[place]
    rounds, last = seen.real_rounds[place], seen.last
    sizes = {
        str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()
    }
    parts = {
        r: sizes.pop(f"parts/{r:06d}.json") + sizes.pop(f"parts/{r:06d}.safetensors")
        for r in range(1, last + 1)
    }
    measured = evaluations(rounds, seen.real_every[place])
    with_figures = mean(parts[r] for r in range(1, last + 1, 2))
    without = with_figures if measured == rounds else mean(parts[r] for r in range(2, last, 2))
    private = sizes.pop("rows/records", 0)
    if private:
        private = (
            private * expected_participation.records[rounds - 1] / expected_participation.records[last - 1]
        )
        # the index of private rows in the state
        index = 16 * (expected_participation.live[rounds - 1] - expected_participation.live[last - 1])
    else:
        index = 0.0
    in_rounds = measured * with_figures + (rounds - measured) * without
    return sum(sizes.values()) + index, in_rounds, private, len(sizes) + 2 * rounds + bool(private)
