"""Work that is shared out over threads is the same work."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.device import on_host
from holdfast.engine.host_threads import each, host_threads, joined
from holdfast.experiment import runner
from holdfast.experiment.config import make_config
from holdfast.results.run import Run
from holdfast.storage.store import read_tensors
from holdfast.sweeps.session import start


def test_results_are_in_order_and_work_runs_at_once() -> None:
    together = threading.Barrier(3, timeout=60)

    def work(item: int) -> tuple[int, str, bool]:
        together.wait()  # nobody goes on alone
        return item * item, threading.current_thread().name, torch.is_grad_enabled()

    with host_threads(3), torch.no_grad():
        answers = each(work, [1, 2, 3])
    assert [answer[0] for answer in answers] == [1, 4, 9] and len({answer[1] for answer in answers}) == 3
    assert not any(answer[2] for answer in answers)
    assert each(lambda item: threading.current_thread() is threading.main_thread(), [1, 2]) == [True, True]


def test_an_error_is_raised_when_all_have_ended() -> None:
    ended = []

    def work(item: int) -> None:
        if item == 0:
            raise ValueError("the first")
        time.sleep(0.05)
        ended.append(item)

    with host_threads(2), pytest.raises(ValueError, match="the first"):
        each(work, [0, 1, 2, 3])
    assert sorted(ended) == [1, 2, 3]


def test_tensors_on_the_host_are_not_copied() -> None:
    value = torch.arange(4.0)
    assert on_host({"a": value})["a"] is value


def test_parts_are_put_end_to_end() -> None:
    parts = [torch.arange(6.0).reshape(2, 3), torch.full((1, 3), 7.0), torch.ones(1).expand(3, 3)]
    alone = joined(parts, torch.device("cpu"))
    with host_threads(2):
        together = joined(parts, torch.device("cpu"))
    assert torch.equal(alone, torch.cat(parts)) and torch.equal(together, alone)
    assert joined(parts[2:], torch.device("cpu")).stride() == (0, 0)  # one is not copied


def test_a_sweep_has_the_same_bits_with_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Private rows, attackers, rules, and what is committed, of cells that are fused and of some that are
    not."""

    def config(method: str, attack: str, rule: str) -> Any:
        return make_config(
            {
                "seed": 3,
                "method": method,
                "aggregator": {"name": rule, "f": 0.3},
                "attack": {"name": attack, "fraction": 0.3},
                "data": {"clients": 7, "partition": {"name": "dirichlet", "beta": 0.5}},
                "model": {"name": "mlp", "hidden": 8},
                "train": {"rounds": 3, "local_epochs": 1, "participation": 0.8},
                "engine": {"threads": 1, "plan": "vmap", "workers": 1},
            }
        )

    table = [
        ("ditto", "min-max", "median"),
        ("ditto", "sign-flip", "rfa"),
        ("fedavg-ft", "lie", "multi-krum"),
        ("fedcap", "ipm", "mean"),
        ("fedavg", "label-flip", "fedcpa"),
    ]
    cells = [(" ".join(run_context), config(*run_context)) for run_context in table]
    start(cells, tmp_path / "one")
    used = []
    monkeypatch.setattr(
        runner, "_host_threads", lambda device, terms, experiments: used.append(experiments) or 4
    )
    start(cells, tmp_path / "many")
    assert used == [len(cells)]
    for one, many in zip(
        sorted((tmp_path / "one").glob("0*")), sorted((tmp_path / "many").glob("0*")), strict=True
    ):
        for name in sorted(one.glob("parts/*.safetensors")) + sorted(one.glob("state/*.safetensors")):
            mine, theirs = read_tensors(name), read_tensors(many / name.relative_to(one))
            assert mine.keys() == theirs.keys() and all(
                torch.equal(mine[key], theirs[key]) for key in mine
            ), name
        for rows in one.glob("rows/records"):  # methods without private rows have none
            assert rows.read_bytes() == (many / "rows" / "records").read_bytes()
        mine, theirs = Run(one).final, Run(many).final
        assert {k: v for k, v in mine.items() if "seconds" not in k} == {
            k: v for k, v in theirs.items() if "seconds" not in k
        }
