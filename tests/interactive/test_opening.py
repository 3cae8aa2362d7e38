"""Runs that were given Python objects: what works without them, and how they are given again."""

from __future__ import annotations

import re
from pathlib import Path

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
