"""The default model: a network by the kind of the samples, named in the manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.core.errors import ConfigError
from holdfast.experiment.config import make_config
from holdfast.models.auto import Auto
from holdfast.sweeps.folder import listed
from tests.experiment.sessions import TINY

DEFAULT = {name: section for name, section in TINY.items() if name != "model"}


@pytest.mark.parametrize(
    "shape, words, name",
    [
        ((3, 32, 32), False, "fedcap-cnn"),
        ((1, 16, 16), False, "fedcap-cnn"),
        ((1, 8, 8), False, "mlp"),  # the embedded digits
        ((1, 64, 15), False, "mlp"),
        ((9, 128), False, "fedcap-cnn"),
        ((9, 15), False, "mlp"),
        ((30,), False, "mlp"),
        ((40,), True, "text-mean"),
    ],
)
def test_the_network_depends_on_the_samples(shape: tuple[int, ...], words: bool, name: str) -> None:
    assert Auto().chosen(shape, words) == name
    given = {"name": name, "weights": "start.safetensors"}
    assert Auto(weights="start.safetensors").chosen(shape, words) == given


def manifest(path: Path) -> Any:
    return json.loads((path / "manifest.json").read_text())["config"]["model"]


def test_a_run_names_the_network_that_was_chosen(tmp_path: Path) -> None:
    run = holdfast.run(DEFAULT, out=tmp_path / "run")
    named = holdfast.run({**DEFAULT, "model": "mlp"}, out=tmp_path / "named")
    assert manifest(tmp_path / "run") == manifest(tmp_path / "named") == "mlp"
    assert run.final["accuracy"] == named.final["accuracy"]
    images = np.random.default_rng(0).random((40, 1, 16, 16), dtype=np.float32)
    data = [(images[:20], np.arange(20) % 3), (images[20:], np.arange(20) % 3)]
    sections = {name: section for name, section in DEFAULT.items() if name != "data"}
    holdfast.run({**sections, "data": data}, out=tmp_path / "images")
    assert manifest(tmp_path / "images") == "fedcap-cnn"


def older(path: Path, file: str) -> None:
    """Write a file as version 0.1 did, whose default was mlp."""
    text = (path / file).read_text()
    (path / file).write_text(text.replace('"model": "auto"', '"model": "mlp"'))


def test_runs_and_sweeps_of_version_0_1_go_on_with_mlp(tmp_path: Path) -> None:
    holdfast.run({**DEFAULT, "model": "mlp"}, out=tmp_path / "run")
    run = holdfast.resume(tmp_path / "run", config=make_config(DEFAULT))
    assert isinstance(run, holdfast.Run) and "accuracy" in run.final
    with pytest.raises(ConfigError, match="began with another config"):
        holdfast.resume(tmp_path / "run", config=make_config({**DEFAULT, "model": "cnn-bn"}))
    table = {**DEFAULT, "sweep": {"seed": [0, 1]}}
    holdfast.sweep(table, out=tmp_path / "sweep")
    older(tmp_path / "sweep", "sweep.json")
    assert [cell["config"]["model"] for cell in listed(tmp_path / "sweep")] == ["mlp", "mlp"]
    assert [cell.status for cell in holdfast.sweep(table, out=tmp_path / "sweep")] == ["finished"] * 2
