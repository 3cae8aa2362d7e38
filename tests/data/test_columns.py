from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.core.errors import DataError
from holdfast.data.columns import Category, Number, kind_of, numbers
from holdfast.data.hashed_words import hash_word


def place(row: int) -> str:
    return f"t.parquet: row {row}"


def chunks(*pieces: list, type: Any = None) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(piece, type) for piece in pieces])


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (pa.array([1]), "number"),
        (pa.array([1], pa.uint8()), "number"),
        (pa.array([1.5], pa.float32()), "number"),
        (pa.array([None]), "number"),
        (pa.array(["a"]), "category"),
        (pa.array(["a"], pa.large_string()), "category"),
        (pa.array([True]), "category"),
        (pa.array(["a"]).dictionary_encode(), "category"),
        (pa.array([7]).dictionary_encode(), "category"),
        (pa.array([1.5]).dictionary_encode(), "number"),
        (pa.array([[1]]), "neither"),
        (pa.array([{"a": 1}]), "neither"),
        (pa.array([b"a"]), "neither"),
        (pa.array([1], pa.timestamp("s")), "neither"),
    ],
)
def test_the_type_of_a_column_decides_its_kind(values: pa.Array, wanted: str) -> None:
    assert kind_of(values.type) == wanted


def test_numbers_are_standardised_by_train_and_missing_ones_are_the_mean() -> None:
    train = numbers(chunks([1, None], [3]), "a", place)
    column = Number("a", train)
    assert column(train, place).tolist() == [[-1.0], [0.0], [1.0]]  # mean 2, deviation 1
    test = numbers(chunks([2.5, float("nan"), 5.0, None]), "a", place)
    got = column(test, place)
    assert numbers(pa.array([2**60 + 1, None]), "a", place)[0] == 2.0**60  # rounded, not refused
    assert got.dtype == np.float32 and got.tolist() == [[0.5], [0.0], [3.0], [0.0]]


@pytest.mark.parametrize("train", [[0.1] * 7, [None, None], [], [4.0, None]])
def test_a_constant_column_becomes_zero(train: list) -> None:
    column = Number("a", numbers(chunks(train, type=pa.float64()), "a", place))
    assert column(numbers(chunks([0.1, 7.0, None]), "a", place), place).tolist() == [[0.0]] * 3


def test_very_large_numbers_do_not_overflow() -> None:
    column = Number("a", np.array([-1e300, 1e300]))
    assert column(np.array([1e300, 0.0]), place).tolist() == [[1.0], [0.0]]
    with pytest.raises(
        DataError,
        match=r"t.parquet: row 1 has 1e\+300 in 'a', too far from the range 0..1 of the train split",
    ):
        Number("a", np.array([0.0, 1.0]))(np.array([0.0, 1e300]), place)


@pytest.mark.parametrize(
    ("low", "high"),
    [(1e15, 1e15 + 1), (-3e-13, -1e-13), (0, 2e-320), (-1.7e308, 1.7e308), (1.7e18, 1.7e18 + 256)],
)
def test_standardising_does_not_depend_on_scale_or_offset(low: float, high: float) -> None:
    train = np.array([low, high] * 500)
    np.testing.assert_allclose(Number("a", train)(train, place)[:4, 0], [-1, 1, -1, 1], rtol=1e-6)
    rare = np.array(
        [low] * 99 + [high]
    )  # a share p of 0.01: deviation sqrt(p (1 - p)), and high is sqrt((1 - p) / p) of it away
    np.testing.assert_allclose(
        Number("a", rare)(rare, place)[[0, 99], 0], [-((0.01 / 0.99) ** 0.5), 99**0.5], rtol=1e-5
    )


def test_small_changes_on_a_large_mean_are_kept() -> None:
    noise = np.random.default_rng(0).normal(size=1000)
    got = Number("a", noise + 1e6)(noise + 1e6, place)[:, 0]
    np.testing.assert_allclose(got, (noise - noise.mean()) / noise.std(), atol=1e-6)


def test_infinite_numbers_name_column_and_row() -> None:
    with pytest.raises(DataError, match="t.parquet: row 3 has an infinite number in 'height'"):
        numbers(chunks([0.0, 1.0], [None, float("-inf")]), "height", place)


@pytest.mark.parametrize(
    ("train", "values", "wanted"),
    [
        (chunks(["b", "a"], ["b", None]), chunks(["a", "b", "c", None]), [[1, 0], [0, 1], [0, 0], [0, 0]]),
        (
            chunks([10, 9, 2]),
            chunks([2, 9, 10], type=pa.int32()),
            [[0, 1, 0], [0, 0, 1], [1, 0, 0]],
        ),  # sorted as words
        (chunks([True, False]), chunks([True, None]), [[0, 1], [0, 0]]),
        (chunks(["x", "y"]).dictionary_encode(), chunks(["y", "x"]), [[0, 1], [1, 0]]),
        (chunks(["x", "y"]), chunks(["y", "z"]).dictionary_encode(), [[0, 1], [0, 0]]),
        (chunks([None, None], type=pa.string()), chunks(["y"]), [[]]),
    ],
)
def test_one_column_for_each_value_of_train(
    train: pa.ChunkedArray, values: pa.ChunkedArray, wanted: list[list[int]]
) -> None:
    column = Category(train, 64)
    got = column(values)
    assert got.dtype == np.float32 and got.shape == (len(values), column.width) and got.tolist() == wanted


def test_many_values_are_hashed_into_buckets() -> None:
    words = ["a", "b", "c", "d"]
    column = Category(chunks(words), 3)
    got = column(chunks(["b", None, "never seen"]))
    wanted = np.zeros((3, 3))
    wanted[0, hash_word("b") % 3] = wanted[2, hash_word("never seen") % 3] = 1
    assert column.width == 3 and np.array_equal(got, wanted)
    assert Category(chunks(words), 4).width == 4 and not Category(chunks(words), 4).hashed


def test_a_hashed_word_need_not_be_utf8() -> None:
    words = pa.array([b"ok", b"\xff\xfe", "é".encode(), b"ok"], pa.binary()).view(pa.string())
    rows = Category(words, buckets=2)(words)
    first = [hash_word(word) % 2 == 0 for word in (b"ok", b"\xff\xfe", "é", "ok")]
    assert rows.sum(1).tolist() == [1, 1, 1, 1] and rows[:, 0].astype(bool).tolist() == first
