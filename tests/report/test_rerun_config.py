"""The config on a page plays the same runs again."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli import main
from holdfast.core.toml import to_toml
from holdfast.experiment.config import make_config
from holdfast.report.read_runs import read_records
from holdfast.report.rerun_config import command, config_text
from holdfast.sweeps.grid import expand
from tests.report.conftest import sweep


def made_from(text: str) -> list[dict[str, Any]]:
    return [make_config(table).plain() for _, table in expand(tomllib.loads(text))]


def same_runs(folder: Path) -> str:
    records = read_records(folder)
    text = config_text(records)
    assert text is not None
    made = made_from(text)
    assert len(made) == len(records) and all(record.run.config.plain() in made for record in records)
    return text


def test_a_single_run(single: Path) -> None:
    text = same_runs(single)
    assert "sweep" not in text and "rounds = 3" in text and "batch_size" not in text  # defaults are left out


def test_a_grid_with_an_override(grid: Path) -> None:
    text = same_runs(grid)
    assert (
        "seed = [0, 1]" in text
        and '"method.name" = ["local", "fedavg", "ditto"]' in text
        and "[[sweep.override]]" in text
    )


def test_other_axes(tmp_path: Path) -> None:
    text = same_runs(sweep(tmp_path / "s", sweep={"train.lr": [0.01, 0.1], "data.clients": [3, 4]}))
    assert '"train.lr" = [0.01, 0.1]' in text


def test_a_grid_with_and_without_an_attack(tmp_path: Path) -> None:
    """No attack is a value of the axis, and what all attacks were told is told to all of them again."""
    attack, train = {"name": "lie", "fraction": 0.5, "z": 1.0}, {"rounds": 1, "local_epochs": 1}
    text = same_runs(
        sweep(
            tmp_path / "a",
            attack=attack,
            train=train,
            sweep={"attack.name": ["none", "lie", "ipm"], "seed": [0, 1]},
        )
    )
    assert '"attack.name" = ["none", "lie", "ipm"]' in text
    assert "0.5" in same_runs(
        sweep(tmp_path / "b", attack=attack, train=train, sweep={"attack.name": ["lie", "ipm"]})
    )


def test_runs_that_are_no_grid_have_no_common_config(tmp_path: Path) -> None:
    for name, lr, epochs in (("a", 0.1, 1), ("b", 0.2, 2), ("c", 0.2, 3)):
        sweep(tmp_path / name, train={"rounds": 1, "lr": lr, "local_epochs": epochs})
    records = read_records(tmp_path)
    text = config_text(records)
    assert text is None or sorted(map(str, made_from(text))) == sorted(
        str(record.run.config.plain()) for record in records
    )


def test_the_command_names_the_workers_that_were_chosen(tmp_path: Path) -> None:
    """On plan vmap the last bits depend on them, and by default they are chosen by timing."""
    sweep(tmp_path / "s", sweep={"seed": [0, 1]}, engine={"plan": "vmap", "workers": 2})
    assert (
        command(read_records(tmp_path / "s"))
        == "holdfast run config.toml --plan vmap --set engine.threads=1 --workers 2"
    )


def test_the_command_gives_the_same_bits(grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    records = read_records(grid)
    Path("config.toml").write_text(config_text(records) or "")
    with pytest.raises(SystemExit) as left:
        main([*command(records).split()[1:], "--out", "again"])
    assert not left.value.code
    again = {(c.method, c.seed): c for c in read_records(Path("again"))}
    for record in records:
        assert again[record.method, record.seed].curve("loss") == record.curve("loss")


words = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(words, values, max_size=4))
def test_toml_reads_back(table: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(table)) == table
