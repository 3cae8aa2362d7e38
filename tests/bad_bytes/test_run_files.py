"""Damaged and hostile files of a run directory, and TOML: one line that names the file, no traceback, no
hang, no large allocation.

Kept cases first; then what Hypothesis makes of the files of a real run, one of whose values is replaced or
taken out."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from holdfast.core.errors import ConfigError, HoldfastError, RunError
from holdfast.core.reading import read_json
from holdfast.data.handed.data import Data
from holdfast.data.handed.kept import keep
from holdfast.data.handed.kept import read as read_data
from holdfast.experiment.config import make_config
from holdfast.experiment.config_tables import read_config
from holdfast.experiment.participation import read_availability
from holdfast.report.live import Lookout
from holdfast.report.read_runs import by_setting, not_begun, read_records
from holdfast.results.run import Run
from holdfast.storage.client_state import RowStore
from holdfast.storage.status import run_status
from holdfast.storage.store import Store, read_tensors, write_tensors
from holdfast.sweeps import session
from holdfast.sweeps.folder import read_sweep
from tests.bad_bytes.helpers import DEEP, broken, budget, one_line
from tests.experiment.sessions import begin

QUICK = budget(60)
NO_JSON = {
    "nothing": b"",
    "a list": b"[]",
    "not UTF-8": b"\xff\xfe{}",
    "deep": DEEP,
    "deep lists": b"[" * 500 + b"]" * 500,
    "within what json follows": b'{"a":' * 200 + b"1" + b"}" * 200,
    "NaN": b'{"round": NaN}',
    "infinity": b'{"round": -Infinity}',
    "an infinite exponent": b'{"round": 1e999}',
    "many digits": b'{"round": ' + b"9" * 1000 + b"}",
    "too many digits": b"9" * 10_000,
    "a zero byte": b'{"round"\0: 1}',
    "half": b'{"round": 1, "sta',
}


@pytest.mark.parametrize("content", NO_JSON.values(), ids=NO_JSON)
def test_json_that_cannot_be_used_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(RunError) as error:
        read_json(tmp_path / "x.json")
    one_line(error.value, "x.json cannot be read")


def test_a_pipe_or_a_hole_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "hole.json").touch()
    os.truncate(tmp_path / "hole.json", 1 << 40)
    for name in ("pipe", "hole"):
        with pytest.raises(RunError, match=f"{name}.json cannot be read: it is"):
            read_json(tmp_path / f"{name}.json")


def test_safetensors_in_a_hole_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "000001.safetensors").touch()
    os.truncate(tmp_path / "parts" / "000001.safetensors", 1 << 43)
    with pytest.raises(RunError, match="000001.safetensors cannot be read"):
        Store(tmp_path).arrays(1)


# ---- a run directory ----


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad") / "run"
    begin(folder, train={"rounds": 2, "participation": 0.5, "lr": 0.1})
    return folder


@pytest.fixture
def run(played: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(played, tmp_path / "run"))


def read_everything(folder: Path) -> None:
    """What status, report, compare and resume read of a run directory."""
    run = Run(folder)
    repr(run)
    run_status(folder, "x").plain()
    len(run.metrics)
    for name in run.tables:
        run.table(name)
    run.malicious(1)
    run.final.get("accuracy")
    Store(folder).head()
    for line in by_setting(read_records(folder)):
        line.mean("accuracy"), line.curve("accuracy"), line.dots(), line.status  # noqa: B018
    run.config.parts()


HEADS: list[dict[str, Any]] = [
    *(
        {"round": round, "state": "state/000002.safetensors"}
        for round in (1e308, 2.0, 10**200, True, -1, "2", None, [2])
    ),
    {"round": 2},
    {"round": 2, "state": 7},
    {"round": 2, "state": "../../elsewhere"},
    {"round": 2, "state": "state/\0"},
    {},
]


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_a_head_that_names_no_round_or_no_state_is_one_line(run: Path, head: dict[str, Any]) -> None:
    (run / "head.json").write_text(json.dumps(head))
    for read in (lambda: Run(run).metrics, Store(run).head, lambda: Run(run).tables):
        if head.get("round") == 2 and read != Store(run).head:
            continue
        with pytest.raises(RunError) as error:
            read()
        one_line(error.value, "head.json is damaged")


def test_rounds_that_were_never_played_are_not_looked_for(run: Path) -> None:
    """A head may be in the range of rounds and yet name one that is a billion away."""
    (run / "head.json").write_text(json.dumps({"round": 10**9, "state": "state/000002.safetensors"}))
    assert list(Run(run).metrics["round"]) == [1, 2] and "seconds" in Run(run).tables


PARTS = [
    {},
    {"round": 1},
    {"round": 2, "metrics": {}},
    {"round": 1, "metrics": []},
    {"round": 1, "metrics": {"accuracy": "high"}},
    {"round": 1, "metrics": {}, "seconds": 3},
    {"round": 1, "metrics": {}, "seconds": {"client": None}},
    {"round": 1, "metrics": {}, "banned": [1]},
    {"round": 1, "metrics": {}, "banned": {"x": "why"}},
    {"round": 1, "metrics": {}, "rejected": {"9" * 50: "why"}},
    {"round": 1, "metrics": {}, "attack": 5},
]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_part_with_other_content_is_one_line(run: Path, part: dict[str, Any]) -> None:
    (run / "parts" / "000001.json").write_text(json.dumps(part))
    for read in (lambda: Run(run).metrics, lambda: Run(run).tables, lambda: read_records(run)):
        with pytest.raises(RunError) as error:
            read()
        one_line(error.value, "parts/000001.json is damaged")


@pytest.mark.parametrize("diverged", [1e308, "2", -3, True, [1]])
def test_a_result_that_diverged_in_no_round_is_one_line(run: Path, diverged: Any) -> None:
    (run / "result.json").write_text(
        json.dumps({"rounds": 2, "final": {"diverged": diverged}, "protocol": {}})
    )
    with pytest.raises(RunError, match="result.json is damaged: 'diverged' cannot be read"):
        run_status(run, "x")


@pytest.mark.parametrize(
    "fields",
    [
        {"a": {"dtype": "nn", "shape": [1]}},
        {"a": {"dtype": "float32", "shape": [1 << 50]}},
        {"a": {"dtype": "float32", "shape": [-1]}},
        {"a": {"dtype": "float32", "shape": "x"}},
        {"a": {"dtype": "float32", "shape": [1.5]}},
        {"a": 1},
        [],
        {},
    ],
    ids=str,
)
def test_rows_of_an_impossible_layout_are_one_line(run: Path, fields: Any) -> None:
    """Not so many bytes as a layout asks for are taken before the file is known to have them."""
    (run / "rows" / "fields.json").write_text(json.dumps({"fields": fields}))
    head = Store(run).head()
    assert head is not None
    rows = RowStore(run / "rows", head[1]["rows/index"])
    with pytest.raises(RunError, match="fields.json is missing or damaged"):
        rows.read(head[1]["rows/index"][:, 0])


@pytest.mark.parametrize(
    "change", ["no index", "no roster", "floats", "a far record", "a negative one", "reasons"]
)
def test_a_committed_state_that_cannot_be_gone_on_from_is_one_line(run: Path, change: str) -> None:
    (run / "result.json").unlink()
    file = run / "state" / "000002.safetensors"
    state = read_tensors(file)
    index = state["rows/index"]
    if change.startswith("no "):
        del state["rows/index" if change == "no index" else "roster/banned"]
    elif change == "reasons":
        state["roster/reasons"] = torch.frombuffer(bytearray(b"[" * 100_000), dtype=torch.uint8)
    elif change == "floats":
        state["rows/index"] = index.double()
    else:
        index[0, 1] = 10**12 if change == "a far record" else -1
    write_tensors(file, state)
    with pytest.raises(RunError) as error:
        session.resume(run)
    one_line(error.value, "damaged")


@pytest.mark.parametrize(
    "failure", [{"round": 1e308}, {"round": "2"}, {"round": 1, "reason": ["x"]}], ids=str
)
def test_a_failure_in_no_round_is_one_line(run: Path, failure: dict[str, Any]) -> None:
    (run / "result.json").unlink()
    (run / "failure.json").write_text(json.dumps(failure))
    with pytest.raises(RunError, match="failure.json is damaged"):
        run_status(run, "x")


@pytest.mark.parametrize(
    "cell",
    [
        3,
        {},
        {"label": 1, "folder": "a", "config": {}},
        {"label": "a", "folder": ["a"], "config": {}},
        {"label": "a", "folder": "../a", "config": {}},
        {"label": "a", "folder": "a", "config": []},
    ],
    ids=str,
)
def test_a_sweep_of_no_cells_is_one_line(run: Path, cell: Any) -> None:
    (run.parent / "sweep.json").write_text(json.dumps({"cells": [cell]}))
    for read in (
        lambda: read_sweep(run.parent),
        lambda: not_begun(read_records(run)),
        Lookout(run.parent).look,
    ):
        with pytest.raises(RunError, match="sweep.json is damaged: it does not list the cells"):
            read()


@pytest.mark.parametrize(
    "content",
    [b"\xff", DEEP, b'{"1": [[0, 1e999]]}', b'{"1": [[0, Infinity]]}', b'{"1": 3}', b'{"a": []}', b"[]"],
    ids=range(7),
)
def test_an_availability_that_cannot_be_used_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_availability(str(tmp_path / "a.json"), 4)
    one_line(error.value, "train.availability")


@pytest.mark.parametrize(
    "name", ["head.json", "parts/000002.json", "result.json", "manifest.json", "rows/fields.json"]
)
def test_any_broken_value_of_a_run_directory_is_one_line(run: Path, name: str) -> None:
    good = json.loads((run / name).read_text())

    @QUICK
    @given(broken(good))
    def check(content: Any) -> None:
        (run / name).write_text(json.dumps(content))
        try:
            read_everything(run)
        except HoldfastError as error:
            one_line(error)

    check()


@QUICK
@given(st.binary(max_size=40))
def test_any_bytes_are_read_as_json_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.json"
    for whole in (content, b'{"a": ' + content + b"}"):
        file.write_bytes(whole)
        try:
            read_json(file)
        except HoldfastError as error:
            one_line(error, "any.json")


@QUICK
@given(st.lists(st.tuples(st.integers(0, 199), st.integers(0, 255)), max_size=4), st.integers(0, 300))
def test_any_bytes_are_read_as_tensors_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], kept: int
) -> None:
    content = bytearray(save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([True])}))
    for place, byte in changes:
        content[place % len(content)] = byte
    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    file.write_bytes(content[:kept])
    try:
        read_tensors(file)
    except HoldfastError as error:
        one_line(error, "any.safetensors cannot be read")


@QUICK
@given(st.lists(st.tuples(st.integers(0, 599), st.integers(0, 255)), max_size=4), st.integers(0, 700))
def test_any_bytes_are_read_as_handed_over_data_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], kept: int
) -> None:
    handed = Data(np.arange(6.0).reshape(3, 2), [0, 1, 0]).samples
    file = keep(handed, tmp_path_factory.getbasetemp())
    assert file is not None
    content = bytearray(file.read_bytes())
    for place, byte in changes:
        content[place % len(content)] = byte
    file.write_bytes(content[:kept])
    try:
        read_data(file)
    except HoldfastError as error:
        one_line(error, f"{file.name} cannot be read")
    finally:
        file.unlink()


# ---- TOML ----

NO_TOML = {
    "not UTF-8": b'seed = 1\nname = "\xff"\n',
    "deep": b"a = " + b"[" * 100_000,
    "deep by dots": b".".join([b"a"] * 5000) + b" = 1",
    "deep tables": b"a = " + b"{a = " * 300 + b"1" + b"}" * 300,
    "many digits": b"seed = " + b"9" * 10_000,
    "half": b'name = "x',
    "a number of 361 digits": b"[data]\nclients = 0x" + b"f" * 300,
    "a zero byte": b"a = 1\0",
    "a date that is none": b"a = 2020-13-45",
}


@pytest.mark.parametrize("content", NO_TOML.values(), ids=NO_TOML)
def test_toml_that_cannot_be_used_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.toml").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_config(tmp_path / "x.toml")
    one_line(error.value, "x.toml cannot be read")


def test_a_config_may_come_through_a_pipe(tmp_path: Path) -> None:
    """As `holdfast run <(make-config)` gives it."""
    read, write = os.pipe()
    os.write(write, b"seed = 7\n")
    os.close(write)
    try:
        assert read_config(f"/dev/fd/{read}") == {"seed": 7}
    finally:
        os.close(read)


def test_an_endless_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/dev/zero cannot be read: it is longer than"):
        read_config("/dev/zero")


KEYS = [b"seed = ", b"[train]\nlr = ", b"[data]\nname = ", b"method = ", b"[sweep]\nseed = "]
VALUES = [
    b"nan",
    b"inf",
    b"-1",
    b"1e400",
    b"9" * 400,
    b'"\\u0000"',
    b"[[]]",
    b"{}",
    b"2020-01-01",
    b"true",
    b'""',
    b"[1, [2, {a = 3}]]",
    b"0x" + b"f" * 300,
]
TOML = st.one_of(
    st.binary(max_size=30), st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES)).map(b"".join)
)


@QUICK
@given(TOML)
def test_any_toml_is_read_or_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(content)
    try:
        table = read_config(file)
        table.pop("sweep", None)
        make_config(table).parts()
    except HoldfastError as error:
        one_line(error)
