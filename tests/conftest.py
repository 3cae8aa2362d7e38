"""Fixtures for all tests. Plain helpers live in tests/helpers.py."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast.api  # noqa: F401  # before any test patches what it imports
from holdfast.core import registry
from holdfast.local import plan_choice
from holdfast.results.run import Run
from holdfast.storage import store
from tests.cli.commands import Answer
from tests.helpers import run_all

# One thread: the tensors are tiny, and bits must not depend on the machine's cores.
torch.set_num_threads(1)
# A shell that starts something in the background has it ignore Ctrl-C, which children inherit; tests that
# send it would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the user's cache or data, fetches anything, or writes runs into the working
    directory."""
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A test that leaves PyTorch with more threads would slow down all that come after it."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def quick_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate plan is timed once. Files that test the choice itself define a fixture of this name that
    does nothing."""
    monkeypatch.setattr(plan_choice, "_TURNS", (1, 1))


@pytest.fixture(autouse=True, scope="session")
def quick_disk() -> Iterator[None]:
    """Nothing waits for the disk: only a power failure could show the difference. Tests of the order in which
    files are synced replace these functions themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda handle: None)
        patch.setattr(store, "sync_file_system", lambda handle: True)
        yield


@pytest.fixture
def simulate(tmp_path: Path) -> Callable[..., Run]:
    """simulate(method="ditto", train={...}) runs a tiny float64 experiment in a new folder."""
    count = 0

    def go(**sections: Any) -> Run:
        nonlocal count
        count += 1
        return run_all([sections], tmp_path / f"run{count}")[0]

    return go


@pytest.fixture
def simulate_all(tmp_path: Path) -> Callable[..., list[Run]]:
    """The same for several experiments in one start: they are driven in lockstep and fused where they can
    be."""
    count = 0

    def go(tables: list[Mapping[str, Any]]) -> list[Run]:
        nonlocal count
        count += 1
        return run_all(tables, tmp_path / f"group{count}")

    return go


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Answer]:
    """cli("run", "--out", path) calls the command line in a fresh working directory."""
    from holdfast.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")  # tables fold their words in a narrow terminal

    def run(*args: Any) -> Answer:
        with pytest.raises(SystemExit) as left:
            main([str(a) for a in args])
        said = capsys.readouterr()
        return Answer(int(left.value.code or 0), said.out, said.err)

    return run


@pytest.fixture
def forget() -> Iterator[None]:
    """Takes parts that a test registers out of the registry again."""
    before = {kind: registry.parts(kind) for kind in registry._PARTS}  # loads the built-in parts, once
    yield
    for kind, known in before.items():
        registry._PARTS[kind] = known
