"""Runs on data that was handed over: the same bits as from a source, on disk, resumed, in sweeps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.core.errors import ConfigError, DataError
from holdfast.core.registry import build
from holdfast.data.handed.content import _IN_USE

RNG = np.random.default_rng(0)
SECTIONS: dict[str, Any] = {
    "method": "ditto",
    "model": "mlp",
    "train": {"rounds": 2, "local_epochs": 1, "lr": 0.1},
    "engine": {"plan": "loop", "threads": 1, "workers": 1},
}


def entry(size: int = 12) -> tuple[np.ndarray, np.ndarray]:
    return RNG.normal(size=(size, 3)).astype(np.float32), np.arange(size) % 2


CLIENTS = {"Berlin": entry(), "Oslo": (*entry(), *entry(4)), "Rome": entry()}


def state(run: holdfast.Run) -> dict[str, torch.Tensor]:
    return run.state()


def same(one: holdfast.Run, other: holdfast.Run) -> bool:
    first, second = one.state(), other.state()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_digits_handed_over_give_the_bits_of_the_source_digits(tmp_path: Path) -> None:
    samples = build("source", "digits").load(None)
    x, y = samples.x.numpy(), samples.y.numpy()
    whole = {"partition": {"name": "dirichlet", "beta": 0.5}, "clients": 5}
    given = holdfast.Data(
        x[:1437], y[:1437], test=(x[1437:], y[1437:]), normalise=(samples.mean, samples.std), **whole
    )
    by_name = holdfast.run(data={"name": "digits", **whole}, out=tmp_path / "a", **SECTIONS)
    handed = holdfast.run(data=given, out=tmp_path / "b", **SECTIONS)
    assert same(by_name, handed)
    assert by_name.final["accuracy"] == handed.final["accuracy"]


def test_a_run_directory_that_was_moved_goes_on_without_the_arrays(tmp_path: Path) -> None:
    whole = holdfast.run(data=CLIENTS, out=tmp_path / "whole", **SECTIONS)
    short = {**SECTIONS, "train": {**SECTIONS["train"], "rounds": 1}}
    holdfast.run(data=CLIENTS, out=tmp_path / "run", **short)
    moved = tmp_path / "elsewhere" / "run"
    shutil.copytree(tmp_path / "run", moved)
    shutil.rmtree(tmp_path / "run")
    longer = moved / "manifest.json"
    longer.write_text(longer.read_text().replace('"rounds": 1', '"rounds": 2'))
    (moved / "result.json").unlink()
    _IN_USE.clear()
    resumed = holdfast.resume(moved)
    assert isinstance(resumed, holdfast.Run) and same(whole, resumed)
    assert resumed.model(client=2) is not None


def test_data_that_is_not_kept_is_asked_for_again(tmp_path: Path) -> None:
    run = holdfast.run(data=holdfast.Data(clients=CLIENTS, keep=False), out=tmp_path, **SECTIONS)
    assert not list(tmp_path.glob("data-*"))
    _IN_USE.clear()
    assert holdfast.Run(tmp_path).final == run.final  # needs no data
    with pytest.raises(DataError, match="holds no copy of its data .*holdfast.resume\\(path, data=...\\)"):
        holdfast.resume(tmp_path)
    with pytest.raises(ConfigError, match="began with data of digest [0-9a-f]{12}, but the data given has"):
        holdfast.resume(tmp_path, data=list(CLIENTS.values())[:2])
    again = holdfast.resume(tmp_path, data=CLIENTS)
    assert isinstance(again, holdfast.Run) and again.model(client=0) is not None


def test_damaged_data_is_refused_by_name(tmp_path: Path) -> None:
    holdfast.run(data=CLIENTS, out=tmp_path, **SECTIONS)
    _IN_USE.clear()
    (file,) = tmp_path.glob("data-*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(holdfast.HoldfastError, match="data-.* is damaged: its digest"):
        holdfast.resume(tmp_path)
    file.write_bytes(content[:100])
    with pytest.raises(holdfast.HoldfastError, match="data-.* cannot be read as data of a run"):
        holdfast.resume(tmp_path)


def test_a_sweep_keeps_its_data_once_and_labels_it_by_its_digest(tmp_path: Path) -> None:
    first, second = (
        holdfast.Data(clients=CLIENTS),
        holdfast.Data(clients=list(CLIENTS.values())[:2], title="two"),
    )
    config = {
        **SECTIONS,
        "data": {"split": {"train": 0.5, "test": 0.5}},
        "sweep": {"data": [first, second], "seed": [0, 1]},
    }
    cells = holdfast.sweep(config, out=tmp_path)
    assert [cell.label for cell in cells] == [
        f"data={name} seed={seed}" for name in (first, "two") for seed in (0, 1)
    ]
    assert sorted(file.name for file in tmp_path.glob("**/data-*")) == sorted(
        f"data-{data.digest[:12]}.safetensors" for data in (first, second)
    )
    run = cells[0].run
    assert run is not None and run.config.data.split.train == 0.5 and run.config.data.names == tuple(CLIENTS)
    _IN_USE.clear()
    assert isinstance(holdfast.resume(tmp_path), list)


def test_sections_are_laid_over_handed_data(tmp_path: Path) -> None:
    base = {**SECTIONS, "data": {"split": {"train": 0.5, "test": 0.5}}}
    run = holdfast.run(base, data=CLIENTS, out=tmp_path)
    assert run.config.data.split.train == 0.5
    assert run.config.data.clients == 3
