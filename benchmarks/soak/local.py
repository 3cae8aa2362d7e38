"""The soak of `holdfast run` and of `holdfast sweep`: killed, frozen, out of disk space, after a power cut;
continued until finished."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soak.compare import content, differences, names
from benchmarks.soak.course import PATIENCE, Course, mixed, settle, spread, undisturbed
from benchmarks.soak.disk import SmallDisk, garble_unsealed
from benchmarks.soak.events import Watch
from benchmarks.soak.memory import Memory, in_words
from benchmarks.soak.processes import WORKER, Command, all_gone, parent, send
from benchmarks.soak.record import KILL, Disturbance, Outcome
from holdfast.core.errors import HoldfastError
from holdfast.experiment.manifest import run_folders
from holdfast.storage.store import Store

FREEZE, POWER, FULL = "freeze", "power cut", "full disk"
RUN = """
seed = 7
[data]
clients = 6
partition = {{ name = "dirichlet", beta = 0.5 }}
[model]
name = "mlp"
hidden = 16
[method]
name = "ditto"
[train]
rounds = {rounds}
local_epochs = 1
momentum = 0.5
participation = 0.7
dropout = 0.1
[engine]
plan = "loop"
threads = 1
workers = {workers}
"""
SWEEP = """
[sweep]
"method.name" = ["ditto", "fedcap"]
seed = [7, 8]
"""


@dataclass
class Work:
    """What is disturbed: one run, or one sweep whose rounds are trained by two worker processes."""

    part: str
    rounds: int
    config: Path = field(init=False)
    command: str = field(init=False)

    def write(self, folder: Path) -> None:
        self.config, self.command = folder / f"{self.part}.toml", "sweep" if self.part == "sweep" else "run"
        text = RUN.format(rounds=self.rounds, workers=2 if self.part == "sweep" else 1)
        self.config.write_text(text + (SWEEP if self.part == "sweep" else ""))

    def runs(self, out: Path) -> list[Path]:
        return run_folders(out) if self.part == "sweep" else [out]

    def folders(self, out: Path) -> Iterable[Path]:
        """Where files appear."""
        inner = [folder for folder in out.glob("*-*") if folder.is_dir()] if self.part == "sweep" else [out]
        shared = [out, out / "groups"] if self.part == "sweep" else []
        return [*shared, *(folder / name for folder in inner for name in ("", "state", "rows", "parts"))]

    def arguments(self, out: Path) -> tuple[object, ...]:
        """Of the command that starts or continues it; before it has a manifest a run can only be started."""
        if self.part == "run" and (out / "manifest.json").exists():
            return ("resume", out)
        return (self.command, self.config, "--out", out)

    def victims(self) -> list[str]:
        return ["parent", "worker", "parent and worker"] if self.part == "sweep" else ["the process"]


def soak(course: Course, outcome: Outcome, kills: int, rounds: int, others: int = 1) -> None:
    """`others` scales how many disturbances there are that are no kills."""
    part, chance = outcome.part, course.chance(outcome.part)
    work = Work(part, rounds)
    work.write(course.work)
    reference = course.work / f"{part}-undisturbed"
    with Memory(course.mark, lambda: _committed(work.runs(reference)), every=0.1) as memory:
        whole = undisturbed(course, outcome, *work.arguments(reference))
    for role, life in memory.by_role().items():
        outcome.memory[f"{role}, undisturbed"] = in_words(life)
    for grown in memory.grown():
        outcome.fail(grown, course.console)
    if whole:
        with Memory(course.mark, lambda: 0, every=0.2) as memory:
            Disturbed(course, work, outcome, chance, reference, others).run(kills)
        outcome.peaks = memory.peaks()


class Disturbed:
    """Runs, or sweeps, one after the other, until all disturbances have been had; each must end as the
    undisturbed one."""

    def __init__(
        self,
        course: Course,
        work: Work,
        outcome: Outcome,
        chance: random.Random,
        reference: Path,
        others: int,
    ):
        self.course, self.work, self.outcome, self.chance, self.others = course, work, outcome, chance, others
        self.names = names(reference)
        self.wanted = {run.name if work.part == "sweep" else "": content(run) for run in work.runs(reference)}
        self.finished = 0

    def run(self, kills: int) -> None:
        part, victims = self.work.part, self.work.victims()
        plan = mixed(
            [
                *((KILL, victim, many) for victim, many in spread(kills, victims)),
                *((FREEZE, victim, self.others) for victim in victims if "and" not in victim),
                (POWER, "", 2 * self.others),
            ],
            part,
            self.chance,
        )
        while plan and not self.course.over and not self.outcome.failures:
            self._one(self.course.work / f"{part}-{self.finished}", plan)
        if not self.outcome.failures and self.others:
            self._on_a_small_disk()
        self.outcome.checks.append(
            f"{self.finished} disturbed ones were finished, each equal to the undisturbed one in all bits"
        )
        if plan and not self.outcome.failures:
            self.outcome.skipped.append(f"{len(plan)} disturbances, for the time was over")

    def _on_a_small_disk(self) -> None:
        disk = SmallDisk(self.course.work / f"{self.work.part}-disk", 12)
        try:
            if disk.reason:
                self.outcome.skipped.append(f"{FULL}: {disk.reason}")
                return
            self._one(
                disk.path / "out",
                [Disturbance(self.work.part, FULL, "") for _ in range(2 * self.others)],
                disk,
            )
        finally:
            disk.remove()

    def _one(self, out: Path, plan: list[Disturbance], disk: SmallDisk | None = None) -> None:
        """From its start to its end, with as many of the planned disturbances as fit."""
        pending: list[Disturbance] = []
        with Watch(lambda: [out.parent, *self.work.folders(out)]) as watch:
            command, gentle = self.course.command(*self.work.arguments(out)), False
            while True:
                planned = plan[0] if plan and not self.course.over else None
                moment = self._moment(planned, command, watch, gentle)
                pending = settle(
                    pending, watch, time.monotonic() if command.ended() and moment is None else None
                )
                if moment is None:
                    break
                one = plan.pop(0)
                one.moment, one.at = moment, time.monotonic()
                pending.append(one)
                self.outcome.disturbances.append(one)
                gentle = self._disturb(one, out, command, disk)
                self.course.say(one, len(self.outcome.disturbances))
                if not gentle:
                    watch.forget(out)
                    command = self.course.command(*self.work.arguments(out))
        if command.wait(0) != 0:
            how = "hung" if command.wait(0) is None else f"ended with {command.wait(0)}"
            self.outcome.fail(
                f"{out.name}: the command {how} without being disturbed: {command.last_line}",
                self.course.console,
            )
            self.course.end_all()
            return
        self._compare(out)

    def _moment(self, one: Disturbance | None, command: Command, watch: Watch, gentle: bool) -> str | None:
        """Wait for the moment of a disturbance; None when the command has ended before. After a gentle one
        there is a commit first."""
        if one is None:
            watch.until(PATIENCE, ended=command.ended)
            return None
        commits = 1 if gentle or one.kind != KILL or WORKER in one.victim else 0
        if not commits and self.chance.random() < 0.3:
            return watch.until(self.chance.uniform(0.0, 6.0), ended=command.ended)
        events = self.chance.randint(
            1, self.work.rounds // 5 * 12 * len(self.wanted)
        )  # a run has about a dozen in a round
        return watch.until(PATIENCE, events, commits, command.ended)

    def _disturb(self, one: Disturbance, out: Path, command: Command, disk: SmallDisk | None) -> bool:
        """Whether the command goes on."""
        workers = [pid for pid in self.course.alive(WORKER) if parent(pid) == command.pid]
        if one.kind == FREEZE:
            return self._freeze(one, out, command, workers)
        if one.kind == FULL:
            return self._fill(one, command, disk)
        if WORKER in one.victim and workers:
            send([self.chance.choice(workers)], signal.SIGKILL)
        if one.victim == WORKER:
            one.followed = "its round went on with new workers"
            return True
        command.kill()
        if left := all_gone(self.course.mark, 10):
            one.broken = f"processes were left: {sorted(left.values())}"
            self.course.end_all()
        if one.kind == POWER:
            one.moment += f", {self._garble(out)} unsealed files lost or rubbish"
        one.followed = f"`holdfast {self.work.arguments(out)[0]}` went on"
        return False

    def _freeze(self, one: Disturbance, out: Path, command: Command, workers: list[int]) -> bool:
        frozen = [self.chance.choice(workers)] if one.victim == WORKER and workers else [command.pid]
        send(frozen, signal.SIGSTOP)
        began, seconds = time.monotonic(), self.chance.uniform(1.0, 3.0)
        one.moment += f", for {seconds:.1f} s"
        one.followed = "it went on"
        if self.work.part == "run":
            second = self.course.command("resume", out)
            code = second.wait(PATIENCE)
            one.followed = "a second process was refused; it went on"
            if code != 2 and code != 1 or "in use by another process" not in second.last_line:
                one.broken = f"a second process was not refused ({code}): {second.last_line}"
        time.sleep(max(0.0, seconds - (time.monotonic() - began)))
        send(frozen, signal.SIGCONT)
        return True

    def _fill(self, one: Disturbance, command: Command, disk: SmallDisk | None) -> bool:
        assert disk is not None
        disk.fill()
        code = command.wait(120)
        disk.free()
        one.at = time.monotonic()
        one.followed = "one line of error; with space again the same command went on"
        if code is None:
            command.kill()
            one.broken = "it neither went on nor stopped within 120 s"
        elif code == 0 or not command.is_one_line_error or "the disk is full" not in command.last_line:
            one.broken = f"it ended with {code}: {command.last_line}"
        return False

    def _garble(self, out: Path) -> int:
        """Experiments of a sweep are sealed together: what one of them has committed, all have on the
        disk."""
        runs = self.work.runs(out) if out.exists() else []
        committed = max((round for run in runs if (round := Store(run).round()) is not None), default=None)
        changed = 0
        for run in runs:
            own = Store(run).round()
            ready = committed is not None and (run / f"state/{committed:06d}.safetensors").exists()
            changed += garble_unsealed(run, committed if ready else own, self.chance)
        return changed

    def _compare(self, out: Path) -> None:
        found = {run.name if self.work.part == "sweep" else "": run for run in self.work.runs(out)}
        if found.keys() != self.wanted.keys():
            self.outcome.fail(f"{out.name} has other runs than the undisturbed one", self.course.console)
            return
        for name, run in found.items():
            try:
                differ = differences(content(run), self.wanted[name])
            except (HoldfastError, ValueError) as error:
                differ = [str(error)]
            if differ:
                self.outcome.fail(
                    f"{run} differs in {len(differ)} values: {', '.join(differ[:5])}", self.course.console
                )
        there = {name for name in names(out) if name != "filler"}
        if there != self.names:
            self.outcome.fail(
                f"{out.name}: other files than the undisturbed one: {sorted(there ^ self.names)[:8]}",
                self.course.console,
            )
        if left := all_gone(self.course.mark):
            self.outcome.fail(f"processes were left: {sorted(left.values())}", self.course.console)
        self.finished += 1


def _committed(runs: list[Path]) -> int:
    try:
        return max((Store(run).round() or 0 for run in runs), default=0)
    except HoldfastError:
        return 0
