"""A run that was killed and resumed is, bit for bit, the run that was never stopped."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.errors import ConfigError, HoldfastError, RunError
from holdfast.engine.simulator import Simulator
from holdfast.experiment import build, manifest, planner
from holdfast.experiment.config import Config, make_config
from holdfast.results.run import Run
from holdfast.storage.client_state import RowStore
from holdfast.storage.store import Store
from holdfast.sweeps import session
from tests.experiment.kills import bits, die_at, digits, in_child, table, was_killed, watched

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded digits are decoded once, not in each of a hundred runs, and nothing waits for the disk:
    what a killed process wrote is the kernel's, synced or not."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(build, "load_samples", lambda settings: digits())


def config(method: str = "ditto", plan: str = "loop", **train: Any) -> Config:
    return make_config(table(method, plan, **train))


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 300
    while not file.exists():
        assert time.monotonic() < deadline, f"there is no {file}"
        time.sleep(0.005)


def begin(given: Config, out: Path) -> None:
    session.start([("", given)], out)


def resume(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the manifest alone; measuring a plan again would be a mistake."""
    with monkeypatch.context() as patch:
        patch.setattr(planner, "choosing", lambda *args: pytest.fail("the plan was measured again"))
        session.resume(out)


@pytest.mark.parametrize(
    ("method", "plan", "every"),
    [
        ("ditto", "loop", False),
        *(
            pytest.param(method, plan, True, marks=pytest.mark.slow)
            for method in ("ditto", "fedavg", "fedcap")
            for plan in ("loop", "vmap")
        ),
    ],
)
def test_killed_at_every_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, plan: str, every: bool
) -> None:
    """Kill before every call that touches the disk or the clients, in round 2 (or in the whole run), resume,
    compare."""
    given, seen = config(method, plan), []
    rounds = []  # the events at which a commit is done

    def note(name: str) -> None:
        seen.append(name)
        if name == "RowStore.settle":
            rounds.append(len(seen))

    with watched(note):
        begin(given, tmp_path / "whole")
    wanted = bits(tmp_path / "whole")
    assert len(rounds) == 4, "round 0 is committed too"
    assert (method == "fedavg") or "RowStore.stage" in seen
    chosen = range(len(seen)) if every else range(rounds[1] - 1, rounds[2] + 2)
    for event in chosen:
        out = tmp_path / f"{event}"
        assert was_killed(in_child(lambda event=event, out=out: die_at(event, given, out))), (
            event,
            seen[event],
        )  # type: ignore[misc]
        if (out / "manifest.json").exists():
            resume(out, monkeypatch)
        else:  # killed before the run existed: it can simply be started
            begin(given, out)
        assert bits(out) == wanted, f"killed before event {event}, {seen[event]}"
        assert not list(out.rglob("*.writing"))


def test_killed_in_the_middle_of_writing_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the rows of round 2 are on disk, then nothing: the committed rows must not have been touched."""
    given = config()
    begin(given, tmp_path / "whole")
    stage = RowStore.stage

    def half(self: RowStore, ids: torch.Tensor, state: Any) -> None:
        if not self.place and not self.pending:
            return stage(self, ids, state)
        stage(self, ids[:1], {name: value[:1] for name, value in state.items()})
        os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        monkeypatch.setattr(RowStore, "stage", half)
        begin(given, tmp_path / "cut")

    assert was_killed(in_child(work)) and Run(tmp_path / "cut").round == 1
    resume(tmp_path / "cut", monkeypatch)
    assert bits(tmp_path / "cut") == bits(tmp_path / "whole")


def test_killed_after_the_last_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the state of the round before was removed: no later commit does it."""

    def work() -> None:
        tidy = Store.tidy

        def strike(self: Store, round: int) -> None:
            if round == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            tidy(self, round)

        monkeypatch.setattr(Store, "tidy", strike)
        begin(config(), tmp_path / "cut")

    assert was_killed(in_child(work)) and Run(tmp_path / "cut").round == 3
    resume(tmp_path / "cut", monkeypatch)
    assert (tmp_path / "cut" / "result.json").exists()
    assert [file.name for file in (tmp_path / "cut" / "state").iterdir()] == ["000003.safetensors"]


def test_killed_twice_in_the_same_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = config(plan="vmap")
    begin(given, tmp_path / "whole")

    def die_in_evaluation() -> None:
        exchange = Simulator.exchange

        def strike(self: Simulator, calls: Any) -> Any:
            if calls[0].run_context.round == 2 and calls[0].exchange.task == "evaluate":
                os.kill(os.getpid(), signal.SIGKILL)
            return exchange(self, calls)

        monkeypatch.setattr(Simulator, "exchange", strike)
        session.resume(tmp_path / "cut") if (tmp_path / "cut").exists() else begin(given, tmp_path / "cut")

    for _ in range(2):
        assert was_killed(in_child(die_in_evaluation)) and Run(tmp_path / "cut").round == 1
    resume(tmp_path / "cut", monkeypatch)
    assert bits(tmp_path / "cut") == bits(tmp_path / "whole")


@pytest.mark.parametrize("plan", ["loop", pytest.param("vmap", marks=pytest.mark.slow)])
def test_killed_at_random_times_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    given = config(plan=plan, rounds=12, dropout=0.2, availability=0.9, momentum=0.5)
    began = time.perf_counter()
    begin(given, tmp_path / "whole")
    whole = (
        time.perf_counter() - began
    )  # on a busy machine everything takes longer, and so must the lives of those who are killed
    out, chance, kills = tmp_path / "cut", random.Random(plan), 0
    while not (out / "result.json").exists() and kills < 12:
        process = os.fork()
        if process == 0:
            signal.alarm(60)
            session.resume(out) if (out / "manifest.json").exists() else begin(given, out)
            os._exit(0)
        # the first may die before there is a run; the others are killed in the middle of one, however slow
        # its start
        if kills:
            wait_for(out / "manifest.json")
        time.sleep(chance.uniform(0.05, 0.4) * whole)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        kills += 1
    resume(out, monkeypatch)
    assert bits(out) == bits(tmp_path / "whole") and kills > 1


PROGRAM = """
import json, sys, time
from pathlib import Path
from holdfast.sweeps import session
from holdfast.experiment.config import make_config
def moved(experiment):
    if experiment.committed == 2:
        print("round 2", flush=True)
        time.sleep(60)
cells = [("", make_config(json.loads(sys.argv[2])))]
session.start(cells, Path(sys.argv[1]), session.RunCallbacks(moved=moved))
"""


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGKILL, 1),
        pytest.param(signal.SIGKILL, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow),
        (signal.SIGINT, 2),
    ],
)
def test_a_killed_process_is_resumed_by_another(tmp_path: Path, number: signal.Signals, workers: int) -> None:
    """A fresh interpreter is stopped, another one goes on; meanwhile nobody else may have the directory. Its
    workers end with it."""
    given, out = table(), tmp_path / "run"
    given["engine"]["workers"] = workers
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(out), json.dumps(given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == b"round 2\n"
    with pytest.raises(RunError, match="in use by another process"):
        session.resume(out)
    with pytest.raises(HoldfastError, match="already holds a run|in use"):
        begin(make_config(given), out)
    reader = Run(out)  # reading needs no lock
    assert len(reader.metrics) == 2 and reader.vector(client=1).isfinite().all()
    process.send_signal(number)
    process.communicate()
    assert process.returncode != 0 and not (out / "result.json").exists()
    session.resume(out)  # the lock went with the process
    begin(make_config(given), tmp_path / "whole")
    assert bits(out) == bits(tmp_path / "whole")


# ---- stopped by the user, or by the machine


def test_ctrl_c_leaves_a_resumable_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(config(), tmp_path / "whole")
    exchange, count = Simulator.exchange, 0

    def interrupt(self: Simulator, calls: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return exchange(self, calls)

    with monkeypatch.context() as patch:
        patch.setattr(Simulator, "exchange", interrupt)
        with pytest.raises(KeyboardInterrupt):
            begin(config(), tmp_path / "cut")
    assert Run(tmp_path / "cut").round == 1
    resume(tmp_path / "cut", monkeypatch)  # and the lock is free
    assert bits(tmp_path / "cut") == bits(tmp_path / "whole")


def test_a_full_disk_at_every_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever write fails: one line, no half commit, and the run goes on once there is space."""
    begin(config(), tmp_path / "whole")
    wanted = bits(tmp_path / "whole")
    for failing in range(6, 40, 5):
        out, count = tmp_path / f"{failing}", 0

        def full(handle: int, failing: int = failing) -> None:
            nonlocal count
            count += 1
            if count == failing:
                raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(HoldfastError, match="the disk is full") as error:
                begin(config(), out)
        assert (
            "\n" not in str(error.value)
            and "holdfast resume" in str(error.value)
            and not list(out.rglob("*.writing"))
        )
        if failing == 6:  # nothing was committed yet, so nothing is left
            assert not out.exists()
            begin(config(), out)
        else:
            resume(out, monkeypatch)
        assert bits(out) == wanted, failing


def test_a_finished_run_only_returns_its_result_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = session.start([("", config())], tmp_path / "run")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*") if file.is_file()}
    monkeypatch.setattr(Simulator, "exchange", lambda *args: pytest.fail("something was computed again"))
    monkeypatch.setattr(
        config().parts().method.Server, "finish", lambda *args: pytest.fail("finish was played again")
    )
    assert session.resume(tmp_path / "run") == first
    assert {
        file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*") if file.is_file()
    } == before
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert session.resume(tmp_path / "elsewhere")[0]["run_dir"] == str(tmp_path / "elsewhere")


def test_a_finish_is_one_more_round_and_survives_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kinds of finish: one that asks clients once more, one that only changes the server's state."""
    from holdfast.methods.averaging import Averaging

    def asks(self: Any, state: Any, ctx: Any) -> Any:
        up = yield ctx.ask("train", state["model"], ctx.available)
        return ctx.reduce(state, up, state["model"]).state | {"model": state["model"] * 0.5}

    def computes(self: Any, state: Any, ctx: Any) -> Any:
        yield from ()
        return state | {"model": state["model"] * 0.5}

    for name, finish in {"asks": asks, "computes": computes}.items():
        monkeypatch.setattr(Averaging, "finish", finish)
        begin(config(), tmp_path / name)
        run = Run(tmp_path / name)
        assert (
            run.round == 4
            and len(run.metrics) == 4
            and run.final["accuracy/global"] == run.metrics["accuracy/global"].iloc[-1]
        )

        def die(name: str = name) -> None:
            commit = Store.commit

            def strike(self: Store, round: int) -> None:
                if round == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
                commit(self, round)

            monkeypatch.setattr(Store, "commit", strike)
            begin(config(), tmp_path / f"{name} cut")

        assert was_killed(in_child(die)) and Run(tmp_path / f"{name} cut").round == 3
        resume(tmp_path / f"{name} cut", monkeypatch)
        assert bits(tmp_path / f"{name} cut") == bits(tmp_path / name)


# ---- sweeps


def sweep(out: Path, plan: str) -> list[tuple[str, Config]]:
    cells = [
        ("a", config("ditto", plan)),
        ("b", make_config({**table("ditto", plan), "seed": 1})),
        ("c", config("fedavg", plan)),
    ]
    session.start(cells, out)
    return cells


@pytest.mark.parametrize("plan", ["loop", "vmap"])
def test_a_sweep_whose_cells_are_in_different_rounds_is_resumed(tmp_path: Path, plan: str) -> None:
    """A kill between the commits of two cells leaves them one round apart; all are ready by then, so the
    others catch up."""
    sweep(tmp_path / "whole", plan)
    commit = Store.commit

    def die() -> None:
        def strike(self: Store, round: int) -> None:
            if round == 2 and self.path.name == "002-c":
                os.kill(os.getpid(), signal.SIGKILL)
            commit(self, round)

        Store.commit = strike  # type: ignore[method-assign]
        sweep(tmp_path / "cut", plan)

    assert was_killed(in_child(die))
    folders = [folder.name for folder in manifest.run_folders(tmp_path / "cut")]
    assert [Run(tmp_path / "cut" / folder).round for folder in folders] == [2, 2, 1]
    results = session.resume(tmp_path / "cut")
    assert [Path(result["run_dir"]).name for result in results] == folders == ["000-a", "001-b", "002-c"]
    for folder in folders:
        assert bits(tmp_path / "cut" / folder) == bits(tmp_path / "whole" / folder)


@pytest.mark.parametrize(
    ("plan", "step"),
    [("vmap", 7), *(pytest.param(plan, 1, marks=pytest.mark.slow) for plan in ("loop", "vmap"))],
)
def test_a_sweep_killed_at_every_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str, step: int
) -> None:
    """Cells whose batches are even, ragged and of another method, with BatchNorm, whose bits depend on who
    else is in the stack. At every stage with the slow tests, otherwise at every seventh."""
    norm = {"model": {"name": "mlp", "hidden": 6, "batch_norm": True}}
    ragged = {
        "data": {"clients": 4, "partition": {"name": "iid", "samples_per_client": 16}}
    }  # 12 to train on, in batches of 5
    tables = {
        "even": table("ditto", plan),
        "ragged": {**table("ditto", plan), **ragged},
        "other": table("fedavg", plan),
    }
    cells = [(label, make_config({**given, **norm})) for label, given in tables.items()]
    seen: list[str] = []
    with watched(seen.append):
        session.start(cells, tmp_path / "whole")
    folders = [folder.name for folder in manifest.run_folders(tmp_path / "whole")]
    wanted = [bits(tmp_path / "whole" / folder) for folder in folders]
    commits = [place for place, name in enumerate(seen) if name == "RowStore.settle"]
    assert len(commits) == 3 * 4
    for event in range(
        commits[5], commits[8] + 3, step
    ):  # from the last commit of round 1 to that of round 2
        out = tmp_path / f"{event}"
        assert was_killed(in_child(lambda event=event, out=out: die_at(event, cells, out))), (
            event,
            seen[event],
        )  # type: ignore[misc]
        resume(out, monkeypatch)
        for folder, expected in zip(folders, wanted, strict=True):
            assert bits(out / folder) == expected, f"{folder}, killed before event {event}, {seen[event]}"


def test_a_folder_of_runs_is_not_resumed_as_a_sweep(tmp_path: Path) -> None:
    begin(config(), tmp_path / "runs" / "one")
    begin(config(), tmp_path / "runs" / "two")
    with pytest.raises(ConfigError, match="are not a sweep; resume them one by one"):
        session.resume(tmp_path / "runs")
    sweep(tmp_path / "sweep", "loop")
    assert session.resume(tmp_path / "sweep" / "000-a")[0]["rounds"] == 3
