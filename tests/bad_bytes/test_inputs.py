"""Damaged and hostile files that a user names (weights, plug-ins, data) or that are kept for later (the
cache), and options: one line, no traceback, no hang, no allocation beyond a bound."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from holdfast.core.errors import ConfigError, DataError, HoldfastError
from holdfast.core.registry import PLUGIN, load_plugin
from holdfast.data.cache import cached
from holdfast.data.hub import _is_whole
from holdfast.data.layout import arrange, find_splits
from holdfast.data.sources.wisdm import read_raw
from holdfast.experiment.config_tables import parse_changes, read_config
from holdfast.models.weights import Weights
from holdfast.sweeps.grid import configs
from tests.bad_bytes.helpers import DEEP, JUNK, LONG, altered, broken, budget, limited, one_line

# ---- weights that a user names ----


def start_from(file: Path) -> None:
    Weights(str(file), head=None).into(nn.Linear(3, 2))


def tensors_of(table: Any, data: bytes = b"", long: int | None = None) -> bytes:
    """A safetensors file with any table at its head."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text) if long is None else long) + text + data


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> Any:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


NO_WEIGHTS = {
    "nothing": b"",
    "a short head": b"\1\2",
    "a head of 2**63": tensors_of(b"{}", long=2**63),
    "a head of 100 MB": tensors_of(b"{}", long=10**8),
    "not JSON": tensors_of(b"{" * 40),
    "deep": tensors_of(DEEP),
    "a list": tensors_of([]),
    "not UTF-8": tensors_of(b'{"\xff": 1}'),
    "10**12 values": tensors_of(entry(shape=[10**12], offsets=[0, 4 * 10**12]), b"\0" * 4),
    "values that overflow": tensors_of(entry(shape=[2**62, 2**62], offsets=[0, 4]), b"\0" * 4),
    "below 0": tensors_of(entry(shape=[-1], offsets=[0, 4]), b"\0" * 4),
    "backwards": tensors_of(entry(offsets=[4, 0]), b"\0" * 4),
    "another kind of number": tensors_of(entry("F7"), b"\0" * 4),
    "a kind of many lines": tensors_of(entry("F\n" * 2000), b"\0" * 4),
    "a name of many lines": tensors_of({"x\n\x1b[31m" * 500: entry()["x"]}, b"\0" * 4),
    "8 bits": tensors_of(entry("F8_E4M3", [4]), b"\0" * 4),
    "more than is told": tensors_of(entry(), b"\0" * 50),
    "metadata that is a number": tensors_of({"__metadata__": 3, **entry()}, b"\0" * 4),
}


@pytest.mark.parametrize("content", NO_WEIGHTS.values(), ids=NO_WEIGHTS)
def test_weights_that_cannot_be_used_are_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w.safetensors").write_bytes(content)
    with limited(mebibytes=64), pytest.raises(ConfigError) as error:
        start_from(tmp_path / "w.safetensors")
    one_line(error.value, "model.weights", "w.safetensors")
    assert str(error.value).isprintable()


def test_weights_in_a_pipe_a_folder_or_a_hole_are_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "hole").touch()
    os.truncate(tmp_path / "hole", 1 << 43)
    for name in ("pipe", "folder", "hole"):
        with limited(), pytest.raises(ConfigError) as error:
            start_from(tmp_path / name)
        one_line(error.value, "model.weights", name)


@LONG
def test_any_weights_are_read_or_one_line(tmp_path: Path, examples: int) -> None:
    good = save(nn.Linear(3, 2).state_dict())
    (tmp_path / "w.safetensors").write_bytes(good)
    start_from(tmp_path / "w.safetensors")
    head = 8 + int.from_bytes(good[:8], "little")

    @budget(examples)
    @given(altered(good[:head]), st.none() | st.integers(0, len(good) - head))
    def check(front: bytes, kept: int | None) -> None:
        (tmp_path / "w.safetensors").write_bytes(front + good[head:][:kept])
        try:
            with limited():
                start_from(tmp_path / "w.safetensors")
        except ConfigError as error:
            one_line(error, "model.weights")

    check()


# ---- plug-ins ----

NO_PYTHON = {
    "not UTF-8": b"x = '\xff'\n",
    "a zero byte": b"x = 1\0\n",
    "no syntax": b"def (:\n",
    "deep": b"(" * 100_000,
    "a deep sum": b"x = " + b"-" * 200_000 + b"1",
    "an exit": b"import sys\nsys.exit(0)\n",
    "an error of many lines": b"raise ValueError('a\\nb' * 2000)\n",
    "an error that has no words": b"class E(Exception):\n    def __str__(self): return ''\nraise E\n",
    "bytes": bytes(range(256)),
    "another coding": b"# coding: nowhere\n",
}


@pytest.mark.parametrize("content", NO_PYTHON.values(), ids=NO_PYTHON)
def test_a_plugin_that_cannot_be_loaded_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "mine.py").write_bytes(content)
    before = {name for name in sys.modules if name.startswith(PLUGIN)}  # of other tests
    with limited(), pytest.raises(ConfigError) as error:
        load_plugin(tmp_path / "mine.py")
    one_line(error.value, "mine.py")
    assert {name for name in sys.modules if name.startswith(PLUGIN)} == before


@pytest.mark.parametrize(
    "name", ["mine.so", "mine.pyc", "mine", "mine.txt", "hole.py", "pipe.py", "folder.py"]
)
def test_only_python_files_are_loaded(tmp_path: Path, name: str) -> None:
    """Compiled code that is damaged ends the process; a hole would be read whole."""
    file = tmp_path / name
    if name == "pipe.py":
        os.mkfifo(file)
    elif name == "folder.py":
        file.mkdir()
    else:
        file.write_bytes(b"\0" * 64)
    if name == "hole.py":
        os.truncate(file, 1 << 40)
    with limited(), pytest.raises(ConfigError) as error:
        load_plugin(file)
    one_line(error.value, name)


# ---- --set ----

SETTINGS = [
    "",
    "=",
    "a",
    "=1",
    "train.lr=",
    "train.lr=nan",
    "train.lr=1e999",
    "seed=" + "9" * 5000,
    "seed=1\n[sweep]\nx = 2",
    "a=[" * 1000,
    "train.lr=" + "[" * 100_000,
    "train.lr=" + "[" * 500 + "]" * 500,
    "data.options." + "a." * 100_000 + "b=1",
    ".=1",
    "..a=1",
    "train.=1",
    "train=3",
    "train.lr.x=1",
    "method.name=[]",
    "method={}",
    "method=[1]",
    "model.name=\0",
    "data.partition={name=3}",
    "data.clients=1e30",
    "train.rounds=-1",
    "engine.memory=inf",
    "seed=2020-01-01",
    "method.name=\ud800",
    "sweep.seed=[]",
    "aggregator.wrap=[[[]]]",
    "aggregator.wrap=[{name={}}]",
    "data.clients=0x" + "f" * 300,
]


@pytest.mark.parametrize("change", SETTINGS, ids=range(len(SETTINGS)))
def test_an_option_that_cannot_be_used_is_one_line(change: str) -> None:
    with limited(), pytest.raises(HoldfastError) as error:
        configs(read_config(None, [change]))
    assert str(error.value).isprintable() and len(str(error.value)) < 8010


KEYS = st.sampled_from(
    [
        "seed",
        "method",
        "method.name",
        "train.lr",
        "train.rounds",
        "data.clients",
        "data.partition",
        "data.options",
        "model.hidden",
        "x",
        "aggregator",
        "aggregator.wrap",
        "engine.memory",
        "evaluate.metrics",
        "train.availability",
        "sweep.seed",
        "detectors",
        "loss",
        "a.b",
        "attack",
    ]
)
VALUES = st.text(max_size=6) | st.sampled_from(
    [
        "nan",
        "-inf",
        "1e400",
        "[]",
        "{}",
        "[[1]]",
        "{name='x'}",
        "{name=3}",
        "2020-01-01",
        "12:00:00",
        "true",
        "''",
        "0x" + "f" * 300,
        "[1,'a']",
        "[{name='nnm'}]",
        "{name='mlp', hidden=-1}",
        "{a.b.c=1}",
    ]
)


@LONG
def test_any_option_is_accepted_or_one_line(examples: int) -> None:
    @budget(examples)
    @given(st.lists(st.tuples(KEYS, VALUES).map("=".join) | st.text(max_size=8), max_size=3))
    def check(changes: list[str]) -> None:
        try:
            with limited():
                parse_changes(changes)
                configs(read_config(None, changes))
        except HoldfastError as error:
            assert str(error).isprintable()

    check()


# ---- data: the cache, marks of downloads, names of files, a text file ----


def made(file: Path) -> list[int]:
    calls: list[int] = []

    def make(new: Any) -> dict[str, Any]:
        calls.append(1)
        new("x", (4, 3), np.uint8)[:] = 7
        new("nothing", (0, 2), np.float32)
        return {"classes": 3, "names": ["a", "b"]}

    entry = cached("mine", [file], make)
    assert (
        entry.facts == {"classes": 3, "names": ["a", "b"]}
        and (entry.arrays["x"] == 7).all()
        and entry.arrays["nothing"].shape == (0, 2)
    )
    return calls


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A file, and the folder of the cache that has what was made of it."""
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train.parquet").write_text("rows")
    assert made(tmp_path / "train.parquet") == [1] and made(tmp_path / "train.parquet") == []
    (folder,) = (tmp_path / "cache").iterdir()
    return tmp_path / "train.parquet", folder


@pytest.mark.parametrize("name", ["facts.json", "x.npy", "nothing.npy"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "hole", "nothing"])
def test_a_cache_that_is_no_files_is_made_again(kept: tuple[Path, Path], name: str, kind: str) -> None:
    file, folder = kept
    (folder / name).unlink()
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    elif kind == "hole":
        (folder / name).touch()
        os.truncate(folder / name, 1 << 40)
    with limited(mebibytes=16):
        made(file)
        assert made(file) == []


def npy_head(shape: str, descr: str = "<f4") -> bytes:
    head = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head


@pytest.mark.parametrize(
    "content",
    [
        npy_head("(1000000000000,)"),
        npy_head("(0, 1000000000)"),
        npy_head("(3,)", "|O") + b"cos\n",
        DEEP,
        b"",
    ],
    ids=range(5),
)
def test_an_array_of_the_cache_that_claims_more_than_it_has_takes_no_memory(
    kept: tuple[Path, Path], content: bytes
) -> None:
    file, folder = kept
    for name in ("x.npy", "nothing.npy"):
        (folder / name).write_bytes(content)
        with limited(mebibytes=16):
            made(file)
            assert made(file) == []


@LONG
def test_any_bytes_of_the_cache_are_read_or_made_again(kept: tuple[Path, Path], examples: int) -> None:
    file, folder = kept
    good = {name: (folder / name).read_bytes() for name in ("facts.json", "x.npy", "nothing.npy")}
    of_bytes = st.sampled_from(sorted(good)).flatmap(
        lambda name: st.tuples(st.just(name), altered(good[name]))
    )
    of_facts = broken(json.loads(good["facts.json"])).map(
        lambda content: ("facts.json", json.dumps(content).encode())
    )

    @budget(examples // 2)
    @given(of_bytes | of_facts)
    def check(change: tuple[str, bytes]) -> None:
        for name, content in good.items():
            (folder / name).write_bytes(content)
        (folder / change[0]).write_bytes(change[1])
        with limited(mebibytes=16):
            made(file)

    check()


@LONG
def test_any_mark_of_a_download_is_read_without_an_exception(tmp_path: Path, examples: int) -> None:
    marks = JUNK | st.fixed_dictionaries({"files": JUNK | st.lists(JUNK, max_size=2)})

    @budget(examples)
    @given(st.binary(max_size=20) | marks.map(lambda content: json.dumps(content).encode()))
    def check(content: bytes) -> None:
        (tmp_path / ".whole.json").write_bytes(content)
        assert _is_whole(tmp_path) in (True, False)

    check()


PIECES = st.sampled_from(
    [
        "train",
        "test",
        "data",
        "0000",
        "train-00000-of-00002",
        "train-0-of-" + "9" * 9,
        "test-1-of-" + "9" * 5000,
        "0" * 5000,
        "..",
        "",
        "%00",
        "\udcff",
        "plain_text",
        "-",
        "1.2",
    ]
)


@LONG
def test_any_names_of_files_are_arranged_or_one_line(examples: int) -> None:
    @budget(examples * 2)
    @given(
        st.lists(
            st.lists(PIECES, min_size=1, max_size=3).map("/".join).map(lambda n: f"{n}.parquet"), max_size=4
        ),
        st.none() | PIECES,
    )
    def check(names: list[str], subset: str | None) -> None:
        try:
            with limited(mebibytes=8):
                arrange(names, subset, "here")
        except DataError as error:
            assert "\n" not in str(error)

    check()


def test_a_folder_of_names_that_are_not_utf8_is_read(tmp_path: Path) -> None:
    os.mkdir(os.fsencode(tmp_path) + b"/\xff\xfe")
    open(os.fsencode(tmp_path) + b"/\xff\xfe/train-\xff.parquet", "wb").close()
    try:
        find_splits(tmp_path, None)
    except DataError as error:
        one_line(error)


RECORD = b"33,Jogging,49105962326000,-0.69,12.68,0.50;\n"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 100,
        b"\0" * 300_000,
        b"," * 300_000,
        b";" * 300_000,
        b"33," + b"J" * 300_000 + b",1,0,0,0;",
        b"9" * 5000 + b",Jogging,1,0,0,0;",
        b"33,Jogging," + b"9" * 30 + b",0,0,0;",
        b"33,Jogging,1,nan,0,0;",
        b"33,Jogging,1,1e39,0,0;",
        b"33,,1,0,0,0;",
    ],
    ids=range(11),
)
def test_a_text_without_a_record_is_one_line_and_a_long_name_costs_no_memory(
    tmp_path: Path, content: bytes
) -> None:
    """Activities are kept in an array, each as long as the longest."""
    (tmp_path / "raw.txt").write_bytes(content)
    with limited(mebibytes=32), pytest.raises(DataError) as error:
        read_raw(tmp_path / "raw.txt")
    one_line(error.value, "raw.txt")
    (tmp_path / "raw.txt").write_bytes(RECORD * 300 + content + b"\n" + RECORD)
    with (
        limited(mebibytes=32),
        pytest.warns(UserWarning) if content.strip(b",;") else contextlib.nullcontext(),
    ):
        assert len(read_raw(tmp_path / "raw.txt").user) == 301


def test_a_text_in_a_hole_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "raw.txt").touch()
    os.truncate(tmp_path / "raw.txt", 1 << 40)
    with limited(), pytest.raises(DataError, match="raw.txt has more than"):
        read_raw(tmp_path / "raw.txt")


@LONG
def test_any_text_of_records_is_read_or_one_line(tmp_path: Path, examples: int) -> None:
    @budget(examples)
    @given(altered(RECORD * 4) | st.binary(max_size=60))
    def check(content: bytes) -> None:
        (tmp_path / "raw.txt").write_bytes(content)
        try:
            with limited(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read_raw(tmp_path / "raw.txt")
        except DataError as error:
            one_line(error, "raw.txt")

    check()
