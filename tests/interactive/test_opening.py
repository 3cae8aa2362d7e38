"""Runs that were given Python objects: what works without them, and how they are given again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast.core.errors import ConfigError
from tests.experiment.sessions import TINY
from tests.interactive.own_model import Net, blobs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> holdfast.Run:
    return holdfast.run(TINY, data=blobs(), model=Net, out=tmp_path_factory.mktemp("own") / "run")


def test_a_model_that_is_given_again_gets_the_saved_weights(run: holdfast.Run) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"holdfast.open({str(run.path)!r}, model=Net)")):
        holdfast.open(run.path).model(client="York")
    found = holdfast.open(run.path, model=Net).model(client="York").state_dict()
    there = run.model(client="York").state_dict()
    assert all(torch.equal(found[name], there[name]) for name in there) and len(there) == 4


def test_another_model_or_setting_is_refused(run: holdfast.Run) -> None:
    with pytest.raises(ConfigError, match="the model given has 43 parameters, the saved one 67"):
        holdfast.open(run.path, model=lambda: Net(5)).model()
    with pytest.raises(ConfigError, match="seed differs"):
        holdfast.open(run.path, model=Net, seed=7)


def test_the_page_shows_the_data_and_names_the_model(run: holdfast.Run) -> None:
    page = run.report().read_text()
    assert "The data cannot be read" not in page and "York" in page
    assert "holdfast.run(&#34;config.toml&#34;, model=Net, data=data, engine=" in page
    assert "model = &#34;&lt;Net&gt;&#34;" in page


def test_an_exported_config_runs_with_the_objects(run: holdfast.Run, tmp_path: Path) -> None:
    file = run.export(tmp_path / "out") / "config.toml"
    with pytest.raises(ConfigError, match="^model was a Python object, .*: model=Net$"):
        holdfast.run(file, data=blobs(), out=tmp_path / "again")
    again = holdfast.run(file, data=blobs(), model=Net, out=tmp_path / "again")
    assert again.final["accuracy"] == run.final["accuracy"]


def test_new_samples_are_normalised_as_in_training(run: holdfast.Run, tmp_path: Path) -> None:
    samples = run._experiment.federation.samples
    assert torch.equal(run.normalise(samples.x.numpy()), samples.batch(torch.arange(len(samples))))
    said = json.loads((run.export(tmp_path / "out") / "normalisation.json").read_text())
    by_hand = (samples.x[0] - torch.tensor(said["mean"])) / torch.tensor(said["std"])
    torch.testing.assert_close(run.normalise(samples.x[0]), by_hand)
    with pytest.raises(ConfigError, match="have shape 4, not 2 x 5"):
        run.normalise(torch.zeros(2, 5))
    with pytest.raises(ConfigError, match="numbers with a fraction, such as float32; X has torch.int64"):
        run.normalise(torch.zeros(2, 4).long())


def test_bytes_are_normalised_on_their_scale(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X, y = rng.integers(0, 256, (30, 3, 6, 6)).astype("uint8"), rng.integers(0, 3, 30)
    run = holdfast.run(TINY, data=holdfast.Data(X, y, clients=3, partition="iid"), out=tmp_path / "bytes")
    samples = run._experiment.federation.samples
    assert torch.equal(run.normalise(X), samples.batch(torch.arange(30)))
    with pytest.raises(ConfigError, match="were bytes, 0 to 255; X has torch.float32"):
        run.normalise(X.astype("float32") / 255)


def test_inner_names_are_not_offered(run: holdfast.Run) -> None:
    assert not {"delivered", "parameters_of", "vector"} & set(dir(run)) and "model" in dir(run)
    sweep = holdfast.Sweep(run.path, [])
    assert not {"append", "pop", "sort"} & set(dir(sweep)) and "frame" in dir(sweep)


def test_data_prints_what_it_is() -> None:
    data = holdfast.Data(np.zeros((6, 1, 5, 5)), np.arange(6) % 2, clients=2, partition="iid")
    assert str(data) == repr(data) and "images of 1 x 5 x 5, 2 classes" in str(data)
    assert data.title == f"arrays-{data.digest[:8]}"
