"""`holdfast data` as a user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import Answer, refused

SWEEP = """
[data]
clients = 5
partition = { name = "dirichlet", min_samples = 1 }
[sweep]
"method.name" = ["fedavg", "ditto"]
"data.partition.beta" = [0.1, 1.0, 10.0]
"""


def test_it_prints_facts_and_the_table_and_writes_nothing(cli: Callable[..., Answer], tmp_path: Path) -> None:
    answer = cli("data", "--set", "data.clients=4", "--set", "data.partition.name=single-label")
    assert answer.code == 0 and list(tmp_path.iterdir()) == []
    assert (
        "digits: 1,437 + 360 samples, 10 classes, 1 x 8 x 8" in answer.out
        and "partition  single-label" in answer.out
    )
    assert answer.out.splitlines()[-2].split()[:3] == ["held", "by", "1"]


def test_json_is_the_whole_table(cli: Callable[..., Answer]) -> None:
    answer = json.loads(
        cli(
            "data", "--set", "data.clients=4", "--set", "data.partition.name=iid", "--part", "all", "--json"
        ).out
    )
    assert sum(map(sum, answer["counts"])) == 1797 and answer["clients"] == 4 and answer["part"] == "all"
    pairs = cli(
        "data", "--set", "data.clients=4", "--set", "data.partition.name=complementary-pairs", "--json"
    )
    assert json.loads(pairs.out)["facts"]["partner"] == [1, 0, 3, 2]


def test_pictures_and_pages_are_written_to_the_given_files(
    cli: Callable[..., Answer], tmp_path: Path
) -> None:
    answer = cli("data", "--png", "a.png", "--html", "a.html", "--part", "test")
    assert answer.code == 0 and answer.out.splitlines()[-2:] == ["a.png", "a.html"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "test samples by client and class" in (tmp_path / "a.html").read_text()


def test_of_a_sweep_one_cell_is_shown(cli: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SWEEP)
    first, last = (json.loads(cli("data", "s.toml", "--cell", cell, "--json").out) for cell in (0, 5))
    assert (
        first["cell"] == "cell 0 of 6 (fedavg beta=0.1); 3 different partitions"
        and first["partition"]["beta"] == 0.1
    )
    assert last["cell"].startswith("cell 5 of 6 (ditto beta=10.0)") and last["digest"] != first["digest"]
    (tmp_path / "s.toml").write_text(SWEEP.replace("[0.1, 1.0, 10.0]", "[1.0]"))
    assert "cell 0 of 2 (fedavg beta=1.0); all with the same data" in cli("data", "s.toml").out


def test_the_digest_is_the_one_in_a_runs_manifest(cli: Callable[..., Answer], tmp_path: Path) -> None:
    options = ["--set", "data.clients=4", "--set", "seed=3", "--set", "data.held_out=1"]
    run = [
        "--set",
        "train.rounds=1",
        "--set",
        "train.local_steps=1",
        "--plan",
        "loop",
        "--set",
        "engine.threads=1",
    ]
    assert cli("run", *options, *run, "--out", "r").code == 0
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert json.loads(cli("data", *options, "--json").out)["digest"] == manifest["partition"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--cell", "1"], "--cell 1: the sweep has cells 0 to 0"),
        (["--open"], "--open: name the page with --html FILE"),
        (["--png", "no/a.png"], "--png: there is no folder no"),
        (["--part", "root"], "--part"),
        (["nothing.toml"], "config file not found: nothing.toml"),
        (["--set", "data.partition.name=by-user"], "this dataset has no users, which by-user needs"),
        (["--set", "data.name=mnist", "--data-dir", "nowhere"], "--data-dir: there is no folder"),
    ],
)
def test_refusals_are_one_line(
    cli: Callable[..., Answer], args: list[str], message: str, monkeypatch: Any
) -> None:
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)
    refused(cli("data", *args), message)
