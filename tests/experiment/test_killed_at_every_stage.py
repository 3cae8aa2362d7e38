"""A process that ends at any stage of saving loses at most the rounds that were not renamed, and goes on with
the same bits; also where private rows are on a device, and the disk gets them while the next round trains."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.core.types import State
from holdfast.engine.client_stack import ClientStack
from holdfast.engine.device_rows import DeviceRows
from holdfast.engine.simulator import Simulator
from holdfast.experiment import build
from holdfast.experiment.config import Config, make_config
from holdfast.experiment.manifest import run_folders
from holdfast.results.run import Run
from holdfast.storage.client_state import RowStore
from holdfast.storage.host_copy import HostCopy
from holdfast.storage.store import PreparedRound, Store
from holdfast.sweeps import session
from tests.experiment.kills import bits, digits, in_child, table
from tests.pretended_gpu import pretended_gpu

torch.set_num_threads(1)
ENDED = 77
"""What the process that was ended says."""


@contextmanager
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr(build, "load_samples", lambda settings: digits())
        yield


def cells() -> list[tuple[str, Config]]:
    """Two experiments in one stack."""
    return [(f"seed{seed}", make_config({**table("ditto", "vmap"), "seed": seed})) for seed in (0, 1)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the runs hold that nothing stopped, on the host."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with quick():
        session.start(cells(), out)
    return [bits(out / folder.name) for folder in run_folders(out)]


@contextmanager
def engine_on(device: bool) -> Iterator[Any]:
    """The engine of a run; on the pretended device, private rows stay there and clients train on the
    host."""
    if not device:
        yield Simulator
        return
    with pretended_gpu() as gpu, pytest.MonkeyPatch.context() as patch:
        perform = ClientStack.perform

        def on_the_host(self: ClientStack, stack: Any, known: Tensor, stored: State) -> Any:
            host = {name: value.cpu() for name, value in stored.items()}
            state, sent = perform(ClientStack(self.plans), stack, known, host)
            there = None if state is None else {name: value.to(gpu.device) for name, value in state.items()}
            return there, sent

        patch.setattr(ClientStack, "perform", on_the_host)
        yield lambda plans, _: Simulator(plans, gpu.device)


STAGES: dict[str, tuple[type, str, int, set[int]]] = {
    "rows are staged": (DeviceRows, "stage", 3, {1, 2}),
    "rows are copied for the host": (HostCopy, "__init__", 1, {0, 1, 2}),
    "prepare": (Store, "prepare", 3, {1}),
    "copy": (PreparedRound, "copy", 1, {0}),
    "hand over": (RowStore, "hand_over", 2, {1}),
    "rows are written": (RowStore, "write", 3, {1}),
    "write": (Store, "write", 3, {1}),
    "write head": (Store, "write_head", 3, {1}),
    "sync of what was written": (Store, "sync", 5, {1}),
    "commit": (Store, "commit", 3, {1}),
    "sync of the commit": (Store, "sync", 6, {2}),
    "tidy": (Store, "tidy", 3, {2}),
    "settle": (RowStore, "settle", 3, {2}),
}
"""Stages of round 2 or 3: the method, the how manyth call of it for one object, and the rounds that may be
committed then. Round 0 is committed at once; `sync` is called before and after the rename."""
ON_THE_HOST = ("prepare", "sync of what was written", "settle")
"""Others: test_write_behind.py."""
OFTEN = ("prepare", "write", "commit", "settle")
CASES = [pytest.param(stage, False, id=f"{stage}-host") for stage in ON_THE_HOST] + [
    pytest.param(stage, True, id=f"{stage}-device", marks=() if stage in OFTEN else pytest.mark.slow)
    for stage in STAGES
]


@pytest.mark.parametrize(("stage", "device"), CASES)
def test_ended_at_a_stage(stage: str, device: bool, whole: list[dict[str, Any]], tmp_path: Path) -> None:
    owner, name, wanted, committed = STAGES[stage]

    def work() -> None:
        original, calls, lock = getattr(owner, name), Counter[int](), threading.Lock()
        objects: list[Any] = []  # none is freed, so that each has an id of its own

        def ending(self: Any, *given: Any, **named: Any) -> Any:
            with lock:
                objects.append(self)
                calls[id(self)] += 1
                if calls[id(self)] == wanted:
                    os._exit(ENDED)
            return original(self, *given, **named)

        with engine_on(device) as engine, pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, ending)
            session.start(cells(), tmp_path, engine=engine)

    with quick():
        status = in_child(work)
        assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == ENDED
        folders = [tmp_path / folder.name for folder in run_folders(tmp_path)]
        assert {Run(folder).round for folder in folders} <= committed
        with engine_on(device) as engine:
            session.resume(tmp_path, engine=engine)
    assert [bits(folder) for folder in folders] == whole
