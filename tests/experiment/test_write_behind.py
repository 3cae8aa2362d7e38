"""A round that is committed while the next one trains: nothing is lost, nothing counts too early."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.core.errors import StoreError
from holdfast.engine.client_stack import ClientStack
from holdfast.engine.simulator import Simulator
from holdfast.experiment import build
from holdfast.experiment.config import Config, make_config
from holdfast.experiment.manifest import run_folders
from holdfast.results.run import Run
from holdfast.storage import write_behind
from holdfast.storage.client_state import RowStore
from holdfast.storage.host_copy import HostCopy
from holdfast.storage.store import PreparedRound, Store
from holdfast.storage.write_behind import WriteBehind
from holdfast.sweeps import session
from tests.experiment.kills import bits, digits, in_child, table, was_killed

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(build, "load_samples", lambda settings: digits())


def cells(alone: bool) -> list[tuple[str, Config]]:
    one = ("", make_config(table("ditto", "vmap")))
    seed = ("seed", make_config({**table("ditto", "vmap"), "seed": 1}))
    return [one] if alone else [("ditto", one[1]), seed, ("fedavg", make_config(table("fedavg", "vmap")))]


def folders(out: Path, alone: bool) -> list[Path]:
    return [out] if alone else [out / folder.name for folder in run_folders(out)]


def during_round_3(monkeypatch: pytest.MonkeyPatch, stage: str, act: Callable[[Store], None]) -> None:
    """Call `act` in the thread that commits, before a stage of round 2, once clients have trained in
    round 3."""
    trained, perform, original = threading.Event(), ClientStack.perform, getattr(Store, stage)

    def performed(self: ClientStack, calls: Any, known: Any, stored: Any) -> Any:
        done = perform(self, calls, known, stored)
        if calls[0].run_context.round == 3:
            trained.set()
        return done

    def wrapped(self: Store, *given: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and self.committed == 1:
            assert trained.wait(20), "round 3 trains while round 2 is on its way"
            act(self)
        return original(self, *given)

    monkeypatch.setattr(ClientStack, "perform", performed)
    monkeypatch.setattr(Store, stage, wrapped)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("stage", "round"), [("write", 1), ("write_head", 1), ("commit", 1), ("tidy", 2)])
def test_killed_while_the_next_round_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, round: int, alone: bool
) -> None:
    def die(store: Store) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        during_round_3(monkeypatch, stage, die)
        session.start(cells(alone), tmp_path / "cut")

    assert was_killed(in_child(work))
    assert {Run(folder).round for folder in folders(tmp_path / "cut", alone)} == {round}
    session.start(cells(alone), tmp_path / "whole")
    session.resume(tmp_path / "cut")
    for cut, whole in zip(folders(tmp_path / "cut", alone), folders(tmp_path / "whole", alone), strict=True):
        assert bits(cut) == bits(whole)


@pytest.mark.parametrize("alone", [True, False])
def test_everything_is_written_as_without_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """Down to the record of each private row, and the length of their file."""
    session.start(cells(alone), tmp_path / "behind")
    monkeypatch.setattr(Simulator, "writes_behind", False)
    session.start(cells(alone), tmp_path / "plain")
    for one, other in zip(
        folders(tmp_path / "behind", alone), folders(tmp_path / "plain", alone), strict=True
    ):
        assert bits(one) == bits(other)
        for rows in other.glob("rows/*"):
            assert (one / "rows" / rows.name).read_bytes() == rows.read_bytes()


def test_a_reader_sees_only_committed_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def look(store: Store) -> None:
        run = Run(store.path)
        written = (store.path / "state" / "000002.safetensors").exists()
        seen.append((written, run.round, len(run.metrics), store.committed))

    during_round_3(monkeypatch, "commit", look)
    session.start(cells(True), tmp_path / "run")
    assert seen == [(True, 1, 1, 1)] and Run(tmp_path / "run").round == 3


def test_callers_see_every_round_once_it_is_committed(tmp_path: Path) -> None:
    seen: list[int] = []

    def moved(experiment: Any) -> None:
        committed = experiment.committed
        assert (Store(experiment.out).round() or 0) >= committed
        if committed not in seen:
            seen.append(committed)

    session.start(cells(True), tmp_path / "run", session.RunCallbacks(moved=moved))
    assert seen == [-1, 0, 1, 2, 3]


@pytest.mark.parametrize("alone", [True, False])
def test_an_error_of_the_disk_stops_all_runs_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    def full(store: Store) -> None:
        def fsync(handle: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", fsync)

    with monkeypatch.context() as patch:
        during_round_3(patch, "write", full)
        with pytest.raises(StoreError, match="the disk is full: could not write") as error:
            session.start(cells(alone), tmp_path / "cut")
    assert "\n" not in str(error.value) and not list((tmp_path / "cut").rglob("*.writing"))
    assert {Run(folder).round for folder in folders(tmp_path / "cut", alone)} == {1}
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    session.resume(tmp_path / "cut")
    session.start(cells(alone), tmp_path / "whole")
    for cut, whole in zip(folders(tmp_path / "cut", alone), folders(tmp_path / "whole", alone), strict=True):
        assert bits(cut) == bits(whole)


def test_after_ctrl_c_the_round_on_its_way_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the lock is free, so another session may go on at once."""
    interrupted, exchange = threading.Event(), Simulator.exchange

    def interrupt(self: Simulator, calls: Any) -> Any:
        if calls[0].run_context.round == 3:
            interrupted.set()
            raise KeyboardInterrupt
        return exchange(self, calls)

    with monkeypatch.context() as patch:
        write = Store.write
        patch.setattr(Simulator, "exchange", interrupt)
        patch.setattr(
            Store,
            "write",
            lambda self, ready: (ready.round < 2 or interrupted.wait(20)) and write(self, ready),
        )
        with pytest.raises(KeyboardInterrupt):
            session.start(cells(True), tmp_path / "cut")
    assert interrupted.is_set() and Run(tmp_path / "cut").round == 2
    session.resume(tmp_path / "cut")
    session.start(cells(True), tmp_path / "whole")
    assert bits(tmp_path / "cut") == bits(tmp_path / "whole")


def test_a_round_too_large_for_copies_is_committed_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    commit = Store.commit

    def noted(self: Store, round: int) -> None:
        threads.add(threading.current_thread().name)
        commit(self, round)

    monkeypatch.setattr(Store, "commit", noted)
    monkeypatch.setattr(write_behind, "most_behind", lambda: 1000)
    session.start(cells(True), tmp_path / "run")
    assert threads == {"MainThread"}


def test_what_is_written_does_not_change_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round without evaluation whose second exchange replaces rows of the first: the records of these are
    forgotten before the other thread looks at what is to be written."""
    rows, seen = RowStore(tmp_path), []
    for stamp in (1.0, 2.0):
        rows.keep()
        rows.stage_copy(torch.tensor([0, 1]), HostCopy({"own": torch.full((2, 3), stamp)}), 0)

    class AtOnce:
        def __init__(self, *_: Any, **__: Any): ...

        def submit(self, *_: Any) -> Future[None]:
            seen.append(dict(rows.unwritten))
            done: Future[None] = Future()
            done.set_result(None)
            return done

    monkeypatch.setattr(write_behind, "ThreadPoolExecutor", AtOnce)
    store: Any = SimpleNamespace()
    assert WriteBehind().begin([PreparedRound(store, 1, rows)], lambda work, items: [*map(work, items)])
    assert seen == [rows.unwritten] and len(rows.unwritten) == 2
