"""Damaged and hostile Parquet files: one line that names the file, no traceback, no allocation beyond what
the file can hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

from holdfast.core.errors import DataError  # noqa: E402
from holdfast.data.columns import Category, numbers  # noqa: E402
from holdfast.data.decode_image import ImageFormat  # noqa: E402
from holdfast.data.images import _first_look  # noqa: E402
from holdfast.data.labels import read_users  # noqa: E402
from holdfast.data.list_columns import first_shape, read_lists  # noqa: E402
from holdfast.data.parquet import ParquetRows, read_labels  # noqa: E402
from holdfast.data.sources.text import read_texts  # noqa: E402
from tests.data.folders import encode, grey, wrapped, write_table  # noqa: E402


def read_everything(path: Path) -> None:
    """As the sources of images, texts, lists and tables do; what is wrong with one column does not keep the
    others from being read."""
    rows = ParquetRows([path])
    rows.count  # noqa: B018

    def lists() -> None:
        shape = first_shape(rows, "x")
        for batch in rows.batches(["x"]):
            read_lists(batch.column(0), shape, "x", rows, 0)

    for read in (
        lambda: read_labels(rows, "label"),
        lambda: read_labels(rows, "word"),
        lambda: read_users(rows, "word"),
        lists,
        lambda: [read_texts(batch.column(0), rows, 0, "text") for batch in rows.batches(["text"])],
        lambda: _first_look(rows, "image", ImageFormat()),
        lambda: [numbers(b.column(0), "n", rows.place) for b in rows.batches(["n"])],
        lambda: Category(rows.column("word"), 2)(rows.column("word")),
        lambda: Category(rows.column("text"), 4)(rows.column("text")),
    ):
        try:
            read()
        except DataError as error:
            assert "\n" not in str(error)


def refused(path: Path, *said: str) -> None:
    with pytest.raises(DataError) as error:
        rows = ParquetRows([path])
        read_labels(rows, "label")
        first_shape(rows, "x")
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in (path.name, *said)), str(
        error.value
    )


@pytest.fixture
def good(tmp_path: Path) -> Path:
    columns = {
        "label": [0, 1, 2, 1],
        "word": pa.array(["a", "b", "c", "d"]).dictionary_encode(),
        "x": [[1.0, 2.0]] * 4,
        "text": ["aa", "bb", "cc", "dd"],
        "image": wrapped(grey(4, 4)),
        "n": [1.0, 2.0, 3.0, 4.0],
    }
    return write_table(tmp_path / "good.parquet", columns, {"label": ["a", "b", "c"]})


def test_a_column_name_that_is_not_utf8_is_a_one_line_error(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.parquet", {"label": [0, 1], "xyzxyz": [1, 2]})
    path.write_bytes(path.read_bytes().replace(b"xyzxyz", b"xyz\x80yz"))
    refused(path, "cannot be read as Parquet")


def test_class_names_nested_too_deep_are_ignored(tmp_path: Path) -> None:
    table = pa.table({"label": [0, 1]}).replace_schema_metadata(
        {"huggingface": '{"info":' * 100_000 + "1" + "}" * 100_000}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert ParquetRows([tmp_path / "a.parquet"]).class_names("label") == ()


def test_dictionary_indices_out_of_range_are_a_one_line_error(tmp_path: Path) -> None:
    """The indices of a page are bytes that may be damaged."""
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"label": pa.array(["a", "b", "a", "b"] * 8).dictionary_encode()}), path, compression="none"
    )
    content = path.read_bytes()
    bits = b"\x01\x09" + bytes([0b10101010] * 4)  # width 1, then 4 groups of 8 indices: a, b, a, b and so on
    assert content.count(bits) == 1
    path.write_bytes(content.replace(bits, b"\x08\x40\x63" + bits[3:]))  # width 8: 32 times index 99
    refused(path)


@pytest.mark.parametrize("claimed", [299, 301, 8000])
def test_a_row_count_that_differs_from_the_row_groups_is_a_one_line_error(
    tmp_path: Path, claimed: int
) -> None:
    path = write_table(tmp_path / "a.parquet", {"label": [0, 1] * 150, "x": [[1.0]] * 300}, rows=300)
    content = path.read_bytes()
    begin = len(content) - 8 - int.from_bytes(content[-8:-4], "little")

    def said(rows: int) -> bytes:
        return bytes(
            [0x16, rows * 2 & 127 | 128, rows * 2 >> 7]
        )  # Thrift: a 64-bit field, then a number in pieces of 7 bits

    assert said(300) in content[begin:]
    path.write_bytes(content[:begin] + content[begin:].replace(said(300), said(claimed), 1))
    refused(path, "rows")


def test_more_rows_than_a_file_of_its_size_can_hold_are_not_read(tmp_path: Path) -> None:
    """Run lengths: a few hundred bytes may stand for any number of rows, and so for all the memory there
    is."""
    pq.write_table(pa.table({"label": pa.nulls(10_000_000, pa.int8())}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 50_000
    refused(tmp_path / "a.parquet", "10,000,000 rows")


@pytest.mark.parametrize(
    "columns",
    [
        {"label": [[0], [1]], "x": [[1.0], [2.0]]},
        {"label": [{"a": 0}, {"a": 1}], "x": [[1.0], [2.0]]},
        {"label": [0, 1], "x": [{"a": 1.0}] * 2},
        {"label": [0, 1], "x": ["a", "b"]},
        {"label": [0, 1], "x": [[], []]},
        {"label": [0, 1], "x": [None, None]},
        {"label": [None, None], "x": [[1.0]] * 2},
        {"label": [b"\xff", b"a"], "x": [[1.0]] * 2},
        {"label": [0.5, 1], "x": [[1.0]] * 2},
        {"label": [float("nan"), 1], "x": [[1.0]] * 2},
        {"label": [], "x": []},
        {"label": [1 << 62, 1], "x": [[1.0]] * 2},
    ],
    ids=lambda columns: str(columns)[:60],
)
def test_columns_of_another_type_raise_a_data_error(tmp_path: Path, columns: dict[str, Any]) -> None:
    path = write_table(tmp_path / "a.parquet", columns)
    try:
        rows = ParquetRows([path])
        read_labels(rows, "label")
        shape = first_shape(rows, "x")
        assert [read_lists(b.column(0), shape, "x", rows, 0) for b in rows.batches(["x"])] and shape == (0,)
    except DataError as error:
        assert path.name in str(error) and "\n" not in str(error)


@pytest.mark.parametrize(
    "images",
    [
        [{"path": "a.png"}] * 2,
        [{"bytes": None, "path": "a.png"}] * 2,
        [{"bytes": "text"}] * 2,
        [{"bytes": [1, 2]}] * 2,
        [None, None],
        [1, 2],
        [{"bytes": encode(grey(1, 4)[0])[:40]}] * 2,
        [{"bytes": {"bytes": b""}}] * 2,
    ],
    ids=range(8),
)
def test_images_without_bytes_are_a_one_line_error(tmp_path: Path, images: list[Any]) -> None:
    path = write_table(tmp_path / "a.parquet", {"image": images})
    with pytest.raises(DataError) as error:
        _first_look(ParquetRows([path]), "image", ImageFormat())
    assert "a.parquet" in str(error.value) and "\n" not in str(error.value)


@settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=3),
    kept=st.one_of(st.none(), st.floats(0, 1)),
)
def test_damaged_bytes_raise_a_data_error(
    good: Path, changes: list[tuple[float, int]], kept: float | None
) -> None:
    """Places count from the end, where the description of the columns is."""
    content = bytearray(good.read_bytes())
    for place, byte in changes:
        content[-1 - int(place**2 * (len(content) - 1))] = byte
    path = good.with_name("bad.parquet")
    path.write_bytes(content[: None if kept is None else int(kept * len(content))])
    try:
        read_everything(path)
    except DataError as error:
        assert "bad.parquet" in str(error) and "\n" not in str(error)


def test_the_file_damaged_in_other_tests_is_valid(good: Path) -> None:
    rows = ParquetRows([good])
    assert (
        rows.count == 4
        and read_labels(rows, "label")[2] == ("a", "b", "c")
        and json.dumps(first_shape(rows, "x")) == "[2]"
    )
