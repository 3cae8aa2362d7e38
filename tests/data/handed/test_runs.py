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
from holdfast.data.handed import data as data_module
from holdfast.data.handed.content import _IN_USE
from holdfast.report.page import render
from holdfast.report.read_runs import RunRecord

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
    with pytest.raises(DataError, match="holds no copy of its data .*holdfast.open\\(.*, data=...\\)"):
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
        f"data={name} seed={seed}" for name in (first.title, "two") for seed in (0, 1)
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


def test_a_comparison_of_methods_keeps_its_data_once(tmp_path: Path) -> None:
    split = {"train": 0.5, "validation": 0.25, "test": 0.25}
    config = {
        **{name: given for name, given in SECTIONS.items() if name != "method"},
        "data": holdfast.Data(clients=CLIENTS, split=split),
        "sweep": {"method.name": ["fedavg", "ditto"], "seed": [0]},
        "tune": {"train.lr": [0.1]},
    }
    tuned = holdfast.tune(config, budget=1, out=tmp_path)
    assert len(tuned.statuses) == 2
    assert [file.parent for file in tmp_path.rglob("data-*.safetensors")] == [tmp_path]


def test_entries_are_read_once_for_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    gather = data_module.gather_clients
    monkeypatch.setattr(data_module, "gather_clients", lambda *given: read.append(1) or gather(*given))
    config = {**SECTIONS, "data": list(CLIENTS.values()), "sweep": {"seed": [0, 1, 2]}}
    assert len(holdfast.sweep(config, out=tmp_path)) == 3
    assert len(read) == 1
    assert len(holdfast.sweep(config, out=tmp_path)) == 3  # the same sweep again


def test_a_common_test_set_needs_one(tmp_path: Path) -> None:
    sections = {**SECTIONS, "evaluate": {"test": "global"}}
    entries = list(CLIENTS.values())
    with pytest.raises(ConfigError, match='evaluate.test = "global": the data has no test set'):
        holdfast.run(data=[entries[0], entries[2]], out=tmp_path / "none", **sections)
    run = holdfast.run(data=entries, out=tmp_path / "one", **sections)
    assert run.clients()["samples"].tolist() == [4, 4, 4]


def test_names_are_in_tables_and_on_the_page(tmp_path: Path) -> None:
    run = holdfast.run(data=CLIENTS, out=tmp_path, **SECTIONS)
    assert run.clients()["name"].tolist() == ["Berlin", "Oslo", "Rome"]
    assert torch.equal(run.vector(client="Oslo"), run.vector(client=1))
    with pytest.raises(ConfigError, match="there is no client 'Olso'; did you mean 'Oslo'"):
        run.vector(client="Olso")
    page = render([RunRecord(tmp_path)])
    assert all(f"client {name}, class" in page for name in CLIENTS)
    assert "holdfast.run(&#34;config.toml&#34;, data=data" in page
