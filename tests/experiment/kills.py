"""Ways to kill a run at a chosen stage, and to compare what it left with another run."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.data.federation import load_samples
from holdfast.engine.simulator import Simulator
from holdfast.experiment.config import Config, make_config
from holdfast.storage.client_state import RowStore
from holdfast.storage.store import Store
from holdfast.sweeps import session

digits = cache(lambda: load_samples(make_config({}).data))


def table(method: str = "ditto", plan: str = "loop", **train: Any) -> dict[str, Any]:
    return {
        "method": method,
        "model": {"name": "mlp", "hidden": 8},
        "data": {"clients": 5, "partition": {"name": "pathological", "samples_per_client": 20}},
        "train": {"rounds": 3, "local_epochs": 1, "batch_size": 5, "lr": 0.1, "participation": 0.6, **train},
        "evaluate": {"metrics": ["macro_f1", "balanced_accuracy", "auc"]},
        "engine": {"plan": plan, "threads": 1},
    }


def bits(path: Path) -> dict[str, Any]:
    """All that a run says and holds, less its seconds."""
    store = Store(path)
    head = store.head()
    assert head is not None
    rows = RowStore(path / "rows", head[1]["rows/index"])
    ids = torch.tensor(sorted(rows.place), dtype=torch.int64)
    out: dict[str, Any] = {f"state/{name}": value for name, value in head[1].items()}
    out |= {f"rows/{name}": value for name, value in rows.read(ids).items()} | {"rows/ids": ids}
    for round in range(head[0] + 1):
        out |= {f"{round}/{name}": value for name, value in store.arrays(round).items()}
    parts = [{k: v for k, v in part.items() if k != "seconds"} for part in store.parts(head[0])]
    result = store.read_json("result.json")
    assert result is not None, "finished"
    final = {k: v for k, v in result["final"].items() if not k.startswith("seconds/")}
    return {k: (v.dtype, v.shape, v.numpy().tobytes()) for k, v in out.items()} | {
        "parts": parts,
        "final": final,
        "round": head[0],
    }


def in_child(work: Callable[[], Any]) -> int:
    """Run it in a fork, which has torch imported already; returns what waitpid says."""
    process = os.fork()
    if process == 0:
        try:
            signal.alarm(60)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(process, 0)[1]


def was_killed(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


STAGES = [
    (Simulator, "exchange"),
    (RowStore, "stage"),
    (RowStore, "index"),
    (RowStore, "settle"),
    (Store, "prepare"),
    (Store, "write"),
    (Store, "write_head"),
    (Store, "sync"),
    (Store, "commit"),
    (Store, "write_json"),
    (os, "fsync"),
    (os, "replace"),
    (Path, "unlink"),
]


@contextlib.contextmanager
def watched(event: Callable[[str], None]) -> Iterator[None]:
    """Calls `event` before each step by which a run touches the world."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in STAGES:
            original = getattr(owner, name)

            def wrapped(
                *args: Any, _original: Any = original, _name: str = f"{owner.__name__}.{name}", **kwargs: Any
            ) -> Any:
                event(_name)
                return _original(*args, **kwargs)

            patch.setattr(owner, name, wrapped)
        yield


def die_at(event: int, given: Config | list[tuple[str, Config]], out: Path) -> None:
    count = 0

    def strike(_name: str) -> None:
        nonlocal count
        if count == event:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    with watched(strike):
        session.start([("", given)] if isinstance(given, Config) else given, out)
