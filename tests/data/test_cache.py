from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.core.errors import DataError
from holdfast.data.cache import New, cached

Make = Callable[[New], dict[str, Any]]


def making(calls: list[str] | None = None, fill: int = 7) -> Make:
    def make(new: New) -> dict[str, Any]:
        if calls is not None:
            calls.append("made")
        new("x", (4, 3), np.uint8)[:] = fill
        new("nothing", (0, 2), np.float32)
        return {"classes": 3, "names": ("a", "b"), "mean": (0.1,)}

    return make


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.parquet"
    path.write_text("rows")
    return path


def left_over(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.name.startswith(".")]


def test_arrays_are_made_once_and_then_mapped(own_cache: Path, file: Path) -> None:
    calls: list[str] = []
    first, again = (cached("set size=3", [file], making(calls)) for _ in range(2))
    assert calls == ["made"] and not left_over(own_cache)
    for entry in (first, again):
        assert isinstance(entry.arrays["x"], np.memmap)
        assert (entry.arrays["x"] == 7).all() and entry.arrays["nothing"].shape == (0, 2)
        assert entry.facts == {
            "classes": 3,
            "names": ["a", "b"],
            "mean": [0.1],
        }  # as JSON has them, also the first time
    assert [path.name.startswith("set-") for path in own_cache.iterdir()] == [True]


def test_writing_to_a_cached_array_never_changes_the_file_and_large_arrays_are_read_only(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        x = cached("set size=3", [file], making([])).arrays["x"]
        assert (x == 7).all()
        x[:] = 5
    monkeypatch.setattr("holdfast.data.cache._PRIVATE", 10)
    with pytest.raises(ValueError, match="read-only"):
        cached("set size=3", [file], making([])).arrays["x"][:] = 5


def test_an_entry_is_made_again_when_the_name_or_a_file_changes(file: Path) -> None:
    calls: list[str] = []
    cached("set size=3", [file], making(calls))
    cached("set size=4", [file], making(calls))
    os.utime(file, ns=(1, 1))
    cached("set size=3", [file], making(calls))
    file.write_text("other")
    cached("set size=3", [file], making(calls))
    assert len(calls) == 4


def _damage_array(path: Path, at: int, value: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(value)] = value
    path.write_bytes(content)


def _damage_facts(path: Path, damage: str) -> None:
    content = json.loads(path.read_text())
    if damage == "a fact is gone":
        del content["facts"]["classes"]
    elif damage == "a fact is another":
        content["facts"]["classes"] = 4
    elif damage == "an array is gone":
        del content["arrays"]["nothing"]
    path.write_text("[]" if damage == "wrong facts" else json.dumps(content))


@pytest.mark.parametrize(
    "damage",
    [
        "cut",
        "no facts",
        "wrong facts",
        "missing",
        "a fact is gone",
        "a fact is another",
        "an array is gone",
        "value",
        "header",
        "shape",
    ],
)
def test_a_damaged_entry_is_made_again(own_cache: Path, file: Path, damage: str) -> None:
    cached("set", [file], making())
    entry = next(own_cache.iterdir())
    if damage == "cut":
        (entry / "x.npy").write_bytes((entry / "x.npy").read_bytes()[:100])
    elif damage == "missing":
        (entry / "x.npy").unlink()
    elif damage == "no facts":
        (entry / "facts.json").unlink()
    elif damage == "value":
        _damage_array(entry / "x.npy", -3, b"\1")
    elif damage == "header":
        _damage_array(entry / "x.npy", 10, b"\xff\xfe(((")
    elif damage == "shape":
        np.save(entry / "x.npy", np.full((3, 4), 7, np.uint8))
    else:
        _damage_facts(entry / "facts.json", damage)
    calls: list[str] = []
    assert (cached("set", [file], making(calls)).arrays["x"] == 7).all() and calls == ["made"]
    cached("set", [file], making(calls))
    assert calls == ["made"] and not left_over(own_cache)


def test_a_failed_entry_leaves_no_files(own_cache: Path, file: Path) -> None:
    def fail(new: New) -> dict[str, Any]:
        new("x", (4,), np.uint8)
        raise DataError("damaged")

    with pytest.raises(DataError, match="damaged"):
        cached("set", [file], fail)
    assert not list(own_cache.iterdir())


def test_files_of_a_killed_process_are_removed(own_cache: Path, file: Path) -> None:
    code = f"""
        import os, numpy as np
        from pathlib import Path
        from holdfast.data.cache import cached
        def make(new):
            new("x", (4,), np.uint8)
            os._exit(9)
        cached("set", [Path({str(file)!r})], make)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)]).returncode == 9
    assert len(left_over(own_cache)) == 1
    cached("set", [file], making())
    assert not left_over(own_cache)


def test_two_processes_can_make_the_same_entry_at_once(own_cache: Path, file: Path) -> None:
    def slow(new: New) -> dict[str, Any]:
        facts = making()(new)
        inner.append(cached("set", [file], making()))  # another is quicker
        return facts

    inner: list[Any] = []
    outer = cached("set", [file], slow)
    assert (outer.arrays["x"] == 7).all() and (inner[0].arrays["x"] == 7).all()
    assert len(list(own_cache.iterdir())) == 1


@pytest.mark.parametrize("way", ["no folder", "full disk"])
def test_a_cache_that_cannot_be_written_is_not_fatal(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "no folder":
        (tmp_path / "a-file").write_text("")
        monkeypatch.setenv(
            "HOLDFAST_CACHE", str(tmp_path / "a-file" / "cache")
        )  # also for root, who may write read-only folders
    else:
        monkeypatch.setattr(os, "posix_fallocate", full)
    entry = cached("set", [file], making())
    assert (
        (entry.arrays["x"] == 7).all()
        and not isinstance(entry.arrays["x"], np.memmap)
        and entry.facts["classes"] == 3
    )


def full(*_: int) -> None:
    raise OSError(28, "No space left on device")


def test_an_array_that_fits_neither_disk_nor_memory_is_a_one_line_error(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full)

    def huge(new: New) -> dict[str, Any]:
        new("x", (1 << 60,), np.uint8)
        return {}

    with pytest.raises(
        DataError,
        match=r"x does not fit into memory, and the cache cannot hold it \(.*\); set HOLDFAST_CACHE",
    ):
        cached("set", [file], huge)


def test_a_missing_input_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone.parquet cannot be read: No such file"):
        cached("set", [tmp_path / "gone.parquet"], making())
