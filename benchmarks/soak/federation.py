"""The soak of a real federation: SuperLink, proxy, nodes and `up` itself are killed, frozen, cut off, out of
disk space and restarted.

`quorum` is 1 and `wait` is long, so that every round waits for every client: then the end is promised to be
the simulator's, bit by bit."""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.soak.compare import content, differences, names, node_rows, private_rows, same_bits
from benchmarks.soak.course import Course, mixed, settle, spread, undisturbed
from benchmarks.soak.disk import SmallDisk, garble_unsealed
from benchmarks.soak.events import Watch
from benchmarks.soak.memory import Memory, in_words
from benchmarks.soak.processes import Command, all_gone, send, temporary
from benchmarks.soak.record import KILL, Disturbance, Outcome
from benchmarks.soak.relay import Relay
from holdfast.core.errors import HoldfastError
from holdfast.deploy.processes import free_port
from holdfast.deploy.project import Project, open_project
from holdfast.storage.store import Store

FREEZE, CUT, TORN, RESTART, FULL = (
    "freeze",
    "connections cut",
    "a connection torn",
    "restarted machine",
    "full disk",
)
CLIENTS = 3
QUIET = 6
"""Rounds at the end that nothing disturbs: what memory does is best seen there."""
ROLES = [
    "SuperLink",
    "SuperExec",
    "proxy",
    "ServerApp",
    "SuperNode",
    "trainer",
    "forks",
    "up",
]
STANDING = {
    "SuperLink": 1,
    "SuperExec": 1,
    "proxy": 1,
    "ServerApp": 1,
    "SuperNode": CLIENTS,
    "trainer": CLIENTS,
    "forks": 1,
}
"""Who is there when a federation is whole."""
_ROUNDS = 6
"""Rounds for each disturbance: while one process is missing, the others may go on."""
RECOVERY = 420.0
"""Seconds that it may take to be whole again with a round committed: several of Flower's minutes."""
EXPERIMENT = """
seed = 7
[data]
clients = {clients}
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
[engine]
plan = "loop"
threads = 1
"""
SETTINGS = {"deadline": 60.0, "quorum": 1.0, "wait": 3600.0, "join": 900.0}


def soak(course: Course, outcome: Outcome, kills: int, others: int = 2, roles: Sequence[str] = ROLES) -> None:
    """`roles` are those that are killed; `others` scales how many disturbances there are that are no
    kills."""
    chance = course.chance(outcome.part)
    disk = SmallDisk(course.work / "disk", 400)
    if disk.reason:
        outcome.skipped.append(f"{FULL}: {disk.reason}")
    plan = mixed(
        [
            *((KILL, role, many) for role, many in spread(kills, chance.sample(list(roles), len(roles)))),
            *((FREEZE, chance.choice(ROLES[:-1]), 1) for _ in range(2 * others)),
            (CUT, "", others),
            (TORN, "", others),
            (RESTART, "", others),
            (FULL, "", 1 if others and not disk.reason else 0),
        ],
        outcome.part,
        chance,
    )
    rounds = _ROUNDS * len(plan) + QUIET
    relay = Relay(free_port())
    try:
        project = _found(course, disk.path / "ward", rounds, relay)
        experiment, simulated = project.experiment, course.work / "simulated"
        if undisturbed(course, outcome, "run", experiment, "--out", simulated):
            with Memory(course.mark, lambda: _round(project), every=1.0) as memory:
                Disturbed(course, outcome, chance, project, relay, disk).run(plan)
            outcome.peaks = memory.peaks()
            outcome.memory = {role: in_words(life) for role, life in memory.by_role().items()}
            for grown in memory.grown():
                outcome.fail(grown, course.console)
            _check(course, outcome, project, simulated, rounds)
    finally:
        course.end_all()
        relay.close()
        if not outcome.held:
            shutil.copytree(
                disk.path / "ward", course.work / "ward", ignore_dangling_symlinks=True, dirs_exist_ok=True
            )
        disk.remove()


def _found(course: Course, ward: Path, rounds: int, relay: Relay) -> Project:
    """A new federation, whose nodes reach the server through the relay."""
    experiment = course.work / "federation.toml"
    experiment.write_text(EXPERIMENT.format(clients=CLIENTS, rounds=rounds))
    command = course.command(
        "federation", "init", ward, "--clients", CLIENTS, "--port", relay.target, "--experiment", experiment
    )
    if command.wait(120) != 0:
        raise SystemExit(f"no federation could be made: {command.last_line}")
    _set(ward / "federation.toml", SETTINGS)
    for client in range(CLIENTS):
        _set(ward / "nodes" / str(client) / "node.toml", {"superlink": f'"127.0.0.1:{relay.port}"'})
    return open_project(ward)


def _set(file: Path, wanted: Mapping[str, object]) -> None:
    kept = [line for line in file.read_text().splitlines() if line.partition(" =")[0] not in wanted]
    file.write_text("\n".join([*(f"{name} = {value}" for name, value in wanted.items()), *kept]) + "\n")


def _round(project: Project) -> int:
    try:
        return Store(project.run).round() or 0
    except HoldfastError:
        return 0


class Disturbed:
    """One federation, from `up` to its last round."""

    def __init__(
        self,
        course: Course,
        outcome: Outcome,
        chance: random.Random,
        project: Project,
        relay: Relay,
        disk: SmallDisk,
    ):
        self.course, self.outcome, self.chance, self.project, self.relay, self.disk = (
            course,
            outcome,
            chance,
            project,
            relay,
            disk,
        )
        self.up = self._command()
        self.early: set[str] = set()
        """Patterns of the names of its files before the first disturbance."""

    def _command(self) -> Command:
        return self.course.command(
            "federation", "resume" if (self.project.run / "head.json").exists() else "up", self.project.path
        )

    def run(self, plan: list[Disturbance]) -> None:
        with Watch(lambda: [self.project.server, self.project.run]) as watch:
            if (
                watch.until(RECOVERY, events=1, commits=2, ended=self.up.ended) is None
                or _round(self.project) < 1
            ):
                self.outcome.fail(f"it did not begin: {self.up.last_line}", self.course.console)
                return
            self.early = patterns(self.project.path)
            for place, one in enumerate(plan):
                if self.course.over or (self.project.run / "result.json").exists():
                    self.outcome.skipped.append(
                        f"{len(plan) - place} disturbances, for the time or the rounds were over"
                    )
                    break
                self._one(one, watch)
            self._finish(watch)
        if extra := patterns(self.project.path) - self.early - LATE:
            self.outcome.fail(f"files were left: {sorted(extra)[:8]}", self.course.console)

    def _one(self, one: Disturbance, watch: Watch) -> None:
        self.outcome.disturbances.append(one)
        wait = self.chance.uniform(0.0, 10.0)
        watch.until(wait, ended=self.up.ended)
        pids = self._victims(one)
        one.moment, one.at = (
            f"round {_round(self.project) + 1}, {wait:.1f} s after the commit before{one.moment}",
            time.monotonic(),
        )
        by_hand = self._disturb(one, pids)
        if by_hand:
            self.up = self._command()
        self._recover(one, watch, by_hand)
        self.course.say(one, len(self.outcome.disturbances))

    def _victims(self, one: Disturbance) -> list[int]:
        """One process of the role, which is waited for: it may be starting."""
        end, one.moment = time.monotonic() + 60, ""
        while one.kind in (KILL, FREEZE) and time.monotonic() < end and not self.up.ended():
            if pids := self.course.alive(one.victim):
                return [self.chance.choice(pids)]
            time.sleep(0.02)
        return []

    def _disturb(self, one: Disturbance, pids: list[int]) -> bool:
        """Whether the operator has to give the command again, by what is promised."""
        if one.kind == FREEZE:
            seconds = self.chance.choice([self.chance.uniform(2.0, 15.0), self.chance.uniform(65.0, 80.0)])
            one.moment += f", for {seconds:.0f} s"
            send(pids, signal.SIGSTOP)
            time.sleep(seconds)
            send(pids, signal.SIGCONT)
        elif one.kind == CUT:
            seconds = self.chance.choice([0.0, self.chance.uniform(3.0, 20.0)])
            one.moment += f", {self.relay.open} connections, for {seconds:.0f} s"
            self.relay.cut(seconds)
            time.sleep(seconds)
        elif one.kind == TORN:
            size = self.chance.randint(2_000, 60_000)
            one.moment += f", after {size} bytes"
            self.relay.cut_after(size)
        elif one.kind == FULL:
            return self._fill(one)
        elif one.kind == RESTART:
            return self._restart(one)
        else:
            send(pids, signal.SIGKILL)
            if one.victim == "up":
                return self._after_up(one)
        one.followed = "it went on by itself"
        return False

    def _after_up(self, one: Disturbance) -> bool:
        self.up.wait(10)
        one.followed = "all of it stopped; `resume` went on"
        if left := all_gone(self.course.mark, 120):
            one.broken = f"processes were left: {sorted(left.values())}"
            self.course.end_all()
        return True

    def _restart(self, one: Disturbance) -> bool:
        """Everything ends at once, /tmp is empty afterwards, and what was not synced is lost."""
        for _ in range(20):
            send(self.course.alive(), signal.SIGKILL)
        self.up.wait(10)
        self.course.end_all()
        changed = garble_unsealed(self.project.run, Store(self.project.run).round(), self.chance)
        shutil.rmtree(temporary(self.course.work))
        one.moment += f", {changed} unsealed files lost or rubbish"
        one.followed = "`resume` went on"
        return True

    def _fill(self, one: Disturbance) -> bool:
        """For a while. It may go on by itself; if it stops, then with one line, and the same command goes
        on."""
        seconds = self.chance.uniform(15.0, 40.0)
        one.moment += f", for {seconds:.0f} s"
        self.disk.fill()
        code = self.up.wait(seconds)
        self.disk.free()
        one.at = time.monotonic()
        one.followed = "it went on by itself, with space again"
        if code is None:
            code = self.up.wait(30)  # it may have been on its way out
        if code is None:
            return False
        one.followed = "one line of error; with space again `resume` went on"
        if not self.up.is_one_line_error or "disk" not in self.up.last_line:
            one.broken = f"`up` ended with {code}: {self.up.last_line[:300]}"
        return True

    def _recover(self, one: Disturbance, watch: Watch, by_hand: bool) -> None:
        """Until a round is committed and everybody is there again."""
        end = time.monotonic() + RECOVERY
        waiting = [one]
        while time.monotonic() < end:
            watch.until(0.5)
            waiting = settle(waiting, watch)
            if (self.project.run / "result.json").exists() or (not waiting and self._whole()):
                settle(waiting, watch, time.monotonic())
                return
            if self.up.ended():
                break
        how = (
            f"`up` ended with {self.up.wait(0)}: {self.up.last_line[:300]}"
            if self.up.ended()
            else f"no recovery within {RECOVERY:.0f} s"
        )
        one.broken = "; ".join(filter(None, [one.broken, how, f"there were {self._roles()}"]))
        one.followed = "it had to be helped: everything was ended, and `resume` went on"
        self.course.end_all()
        self.up.wait(10)
        if not (self.project.run / "result.json").exists():
            self.up = self._command()
            watch.until(RECOVERY, events=1, commits=1, ended=self.up.ended)

    def _whole(self) -> bool:
        there = self._roles()
        return all(there.get(role, 0) >= many for role, many in STANDING.items())

    def _roles(self) -> dict[str, int]:
        there: dict[str, int] = {}
        for role in ("up", *STANDING):
            there[role] = len(self.course.alive(role))
        return there

    def _finish(self, watch: Watch) -> None:
        end = time.monotonic() + RECOVERY + 60 * QUIET
        while not self.up.ended() and time.monotonic() < end:
            watch.until(1.0, ended=self.up.ended)
        code = self.up.wait(0)
        if code is None:
            self.outcome.fail("it did not end", self.course.console)
        elif code != 0 and not (self.project.run / "result.json").exists():
            self.outcome.fail(f"`up` ended with {code}: {self.up.last_line[:300]}", self.course.console)


LATE = {"server/run/result.json", "server/logs/run-#.log"}
"""What a run writes at its end."""


def patterns(ward: Path) -> set[str]:
    """Names of files, with numbers and digests left out."""
    found = {name for name in names(ward) if not name.startswith("server/run/parts/")}
    return {re.sub(r"[0-9a-f]{8,}|\d+", "#", name) for name in found}


def _check(course: Course, outcome: Outcome, project: Project, simulated: Path, rounds: int) -> None:
    """Nothing lost, the ends equal, nobody blamed, nothing left."""
    fail = outcome.fail
    if left := all_gone(course.mark):
        fail(f"processes were left: {sorted(left.values())}", course.console)
    if left_over := names(temporary(course.work)):
        fail(
            f"{len(left_over)} temporary files or sockets were left: {sorted(left_over)[:5]}", course.console
        )
    if half := [str(file.relative_to(project.path)) for file in project.path.rglob("*.writing")]:
        fail(f"half-written files were left: {half[:5]}", course.console)
    try:
        ledger = project.ledger()
        committed = [entry.round for entry in ledger.of("round")]
        if committed != list(range(1, rounds + 1)):
            fail(f"the ledger has not every round once: {committed}", course.console)
        for entry in ledger.of("strike", "ban", "stranger"):
            fail(
                f"{entry.kind} of client {entry.client} in round {entry.round}: {entry.what}", course.console
            )
        if differ := differences(content(project.run, private=False), content(simulated, private=False)):
            fail(
                f"the run differs from the simulator's in {len(differ)} values: {', '.join(differ[:5])}",
                course.console,
            )
        for client, row in private_rows(simulated).items():
            if not same_bits(node_rows(project.node(client), rounds), row):
                fail(f"the private state of client {client} differs from the simulator's", course.console)
    except (HoldfastError, ValueError) as error:
        fail(str(error), course.console)
    if not outcome.failures:
        outcome.checks.append(
            f"{rounds} rounds with {CLIENTS} nodes, each once in the ledger; model, figures and private"
            " states are the simulator's; nobody was struck or banned"
        )
