from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from holdfast.core.errors import DataError
from holdfast.core.registry import build
from tests.data.folders import write_table


def load(name: str, dir: Path, **options: Any) -> Any:
    return build("source", {"name": name, **options}).load(dir)


def har(
    folder: Path, widths: tuple[int, ...] = (1152,) * 4, labels: tuple[int, ...] = (0, 5, 2, 3)
) -> np.ndarray:
    """Three rows of train in two shards, one of test; the windows as [n, 9, 128]."""
    rows = [
        np.random.default_rng(row).normal(row, 1 + row, width).astype(np.float32)
        for row, width in enumerate(widths)
    ]
    for name, part in (
        ("train-00000-of-00002", [0, 1]),
        ("train-00001-of-00002", [2]),
        ("test-00000-of-00001", [3]),
    ):
        columns = {
            "user": [30 - row for row in part],
            "signal": [rows[row] for row in part],
            "label": [labels[row] for row in part],
        }
        write_table(folder / f"{name}.parquet", columns)
    return np.stack([row[:1152].reshape(9, 128) for row in rows])


def test_uci_har_is_channels_by_time_and_normalised_by_train(tmp_path: Path) -> None:
    wanted = har(tmp_path / "uci_har")
    samples = load("uci-har", tmp_path)
    assert np.array_equal(samples.x.numpy(), wanted) and samples.train_rows == 3 and samples.classes == 6
    assert samples.y.tolist() == [0, 5, 2, 3] and samples.user.tolist() == [
        3,
        2,
        1,
        0,
    ]  # users 30, 29, 28, 27, ascending from 0
    assert samples.class_names[5] == "LAYING"
    np.testing.assert_allclose(samples.mean, wanted[:3].mean((0, 2), dtype=np.float64), atol=1e-9)
    train = samples.batch(torch.arange(3), torch.float64)
    np.testing.assert_allclose(train.mean((0, 2)), 0, atol=1e-6)
    np.testing.assert_allclose(train.std((0, 2), unbiased=False), 1, atol=1e-6)
    assert torch.equal(
        load("uci-har", tmp_path, normalise="none").batch(torch.tensor([3]))[0], torch.from_numpy(wanted[3])
    )


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        (pa.list_(pa.int16()), "channels"),
        (pa.list_(pa.float64(), 6), "channels"),
        (pa.large_list(pa.float32()), "time"),
        (pa.list_(pa.list_(pa.float32())), "channels"),
        (pa.list_(pa.list_(pa.float32(), 2), 3), "time"),
    ],
)
def test_windows_of_your_own_from_any_kind_of_list(tmp_path: Path, kind: pa.DataType, order: str) -> None:
    rows = np.arange(30).reshape(5, 2, 3)
    stored = rows if order == "channels" else rows.transpose(0, 2, 1)
    lists = stored.tolist() if pa.types.is_nested(kind.value_type) else stored.reshape(5, 6).tolist()
    write_table(tmp_path / "mine" / "train.parquet", {"ecg": pa.array(lists, kind), "label": [0, 1, 0, 1, 2]})
    samples = load("windows", tmp_path, folder="mine", signal="ecg", channels=2, order=order, test=0)
    assert np.array_equal(samples.x.numpy(), rows) and samples.classes == 3 and samples.user is None


def test_a_channel_that_never_changes_is_not_divided_by_zero(tmp_path: Path) -> None:
    write_table(tmp_path / "mine" / "train.parquet", {"signal": [[1.0, 1.0, 5.0, 7.0]] * 2, "label": [0, 1]})
    samples = load("windows", tmp_path, folder="mine", channels=2, test=0)
    assert samples.batch(torch.tensor([0])).tolist() == [[[0.0, 0.0], [-1.0, 1.0]]]


@pytest.mark.parametrize(
    ("signal", "message"),
    [
        ([[1.0, 2.0], [1.0]], "train.parquet: row 1 has 1 numbers in 'signal', expected 2"),
        ([[1.0, 2.0], None], "train.parquet: row 1 has 0 numbers in 'signal', expected 2"),
        ([[1.0, 2.0], [1.0, None]], "row 1 has a missing or infinite number in 'signal'"),
        ([[1.0, 2.0], [float("inf"), 1.0]], "row 1 has a missing or infinite number in 'signal'"),
        (
            [[1.0, 2.0, 3.0]] * 2,
            "row 0 has 3 numbers in 'signal', not 2 channels of equal length; set data.options.channels",
        ),
        (pa.array([[], []], pa.list_(pa.float32())), "row 0 has 0 numbers in 'signal', not 2 channels"),
        ([1.0, 2.0], "column 'signal' holds double, not lists of numbers"),
        ([["a", "b"]] * 2, "column 'signal' holds list<.*string>, not lists of numbers"),
    ],
)
def test_damaged_windows_are_a_one_line_error(tmp_path: Path, signal: list, message: str) -> None:
    write_table(tmp_path / "mine" / "train.parquet", {"signal": signal, "label": [0, 1]})
    with pytest.raises(DataError, match=message) as error:
        load("windows", tmp_path, folder="mine", channels=2)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (
            [[1, 2], [3, 4, 5, 6]],
            "row 3 has a list of length 2 in 'signal', expected 3",
        ),  # the numbers are as many as they should be
        ([[1, 2], [3, 4], [5, 6]], "row 3 has a list of length 3 in 'signal', expected 2"),
        ([[1, 2, 3, 4, 5, 6], None], "row 3 has a list of length 6 in 'signal', expected 3"),
        ([[1, 2, 3], None], "row 3 has a list of length 0 in 'signal', expected 3"),
        (None, "row 3 has a list of length 0 in 'signal', expected 2"),
    ],
)
def test_lists_of_lists_have_one_length_at_every_level(tmp_path: Path, odd: Any, message: str) -> None:
    signal = pa.array([[[1, 2, 3], [4, 5, 6]]] * 3 + [odd], pa.list_(pa.list_(pa.float32())))
    write_table(tmp_path / "mine" / "train.parquet", {"signal": signal, "label": [0, 1, 0, 1]}, rows=4)
    with pytest.raises(DataError, match=f"train.parquet: {message}"):
        load("windows", tmp_path, folder="mine", channels=2)


def test_splits_with_lists_of_different_depth_are_refused(tmp_path: Path) -> None:
    write_table(
        tmp_path / "mine" / "train.parquet", {"signal": [[[1.0, 2.0], [3.0, 4.0]]] * 2, "label": [0, 1]}
    )
    write_table(tmp_path / "mine" / "test.parquet", {"signal": [[1.0, 2.0, 3.0, 4.0]], "label": [0]})
    with pytest.raises(
        DataError,
        match="test.parquet: column 'signal' holds list<.*double>, but the train split has lists of 2 levels",
    ):
        load("windows", tmp_path, folder="mine", channels=2)


def test_uci_har_of_another_length_or_with_other_labels_is_refused(tmp_path: Path) -> None:
    har(tmp_path / "long" / "uci_har", (1152, 1152, 1161, 1152))
    with pytest.raises(
        DataError, match="train-00001-of-00002.parquet: row 0 has 1161 numbers in 'signal', expected 1152"
    ):
        load("uci-har", tmp_path / "long")
    har(tmp_path / "label" / "uci_har", labels=(0, 5, 2, 6))
    with pytest.raises(
        DataError,
        match="test-00000-of-00001.parquet: row 0 has label 6 in 'label', expected whole numbers 0..5",
    ):
        load("uci-har", tmp_path / "label")
    write_table(
        tmp_path / "user" / "uci_har" / "train.parquet",
        {"subject": [1], "signal": [[0.0] * 1152], "label": [0]},
    )
    with pytest.raises(DataError, match="no column 'user'"):
        load("uci-har", tmp_path / "user")


def test_the_real_uci_har(real: Callable[[str], Path]) -> None:
    samples = load("uci-har", real("uci_har"))
    assert samples.x.shape == (10299, 9, 128) and samples.train_rows == 7352
    assert torch.bincount(samples.y[:7352]).tolist() == [1226, 1073, 986, 1286, 1374, 1407]
    assert torch.bincount(samples.y[7352:]).tolist() == [496, 471, 420, 491, 532, 537]
    assert (samples.user[7352:].unique() + 1).tolist() == [2, 4, 9, 10, 12, 13, 18, 20, 24] and len(
        samples.user.unique()
    ) == 30
    gravity = (samples.x[:, 6:9] - samples.x[:, 0:3]).norm(dim=1)  # total less body acceleration
    assert abs(float(gravity.mean()) - 1.023) < 0.002 and abs(float(gravity.std()) - 0.013) < 0.002
    train = samples.batch(torch.arange(7352))
    torch.testing.assert_close(train.mean((0, 2)), torch.zeros(9), rtol=0, atol=1e-3)
    torch.testing.assert_close(train.std((0, 2)), torch.ones(9), rtol=0, atol=1e-3)
