from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.registry import build
from holdfast.data.federation import DataSettings
from holdfast.report.class_counts import columns_of
from tests.data.folders import write_table


def load(dir: Path, **options: Any) -> Any:
    return build("source", {"name": "table", "folder": "adult", **options}).load(dir)


def adult(folder: Path, **change: Any) -> None:
    train = {
        "age": [20, 40, None, 30],
        "work": ["private", "state", "private", None],
        "citizen": [True, False, True, True],
        "zip": [9, 10, 9, 9],
        "constant": [7.5] * 4,
        "income": ["<=50K", ">50K", "<=50K", ">50K"],
    }
    test = {
        "age": [50],
        "work": ["never seen"],
        "citizen": [False],
        "zip": [9],
        "constant": [8.5],
        "income": [">50K"],
    }
    write_table(folder / "train.parquet", {**train, **change})
    write_table(folder / "test.parquet", test)


def test_all_columns_but_the_label_are_used(tmp_path: Path) -> None:
    adult(tmp_path / "adult")
    samples = load(tmp_path, label="income", categorical=["zip"])
    spread = np.sqrt(200 / 3)  # of the ages 20, 40 and 30, whose mean is 30
    wanted = [  # age, private, state, false, true, zip 10, zip 9, constant
        [-10 / spread, 1, 0, 0, 1, 0, 1, 0],
        [10 / spread, 0, 1, 1, 0, 1, 0, 0],
        [0, 1, 0, 0, 1, 0, 1, 0],
        [0, 0, 0, 0, 1, 0, 1, 0],
        [20 / spread, 0, 0, 1, 0, 0, 1, 0],
    ]
    assert samples.x.dtype == torch.float32 and samples.train_rows == 4
    np.testing.assert_allclose(samples.x, wanted, rtol=1e-6)
    assert torch.equal(samples.batch(torch.arange(5)), samples.x)  # standardised already
    assert (
        samples.class_names == ("<=50K", ">50K")
        and samples.y.tolist() == [0, 1, 0, 1, 1]
        and samples.user is None
    )


def test_chosen_columns_in_their_order_hashed_beyond_the_buckets_and_a_user(tmp_path: Path) -> None:
    adult(tmp_path / "adult", person=["b", "a", "b", "c"])
    with pytest.raises(DataError, match="no column 'person'"):
        load(tmp_path, label="income", user="person")
    (tmp_path / "adult" / "test.parquet").unlink()
    samples = load(tmp_path, label="income", user="person", columns=["citizen", "age"], test=0)
    assert samples.x.shape == (4, 3) and samples.x[:, :2].tolist() == [[0, 1], [1, 0], [0, 1], [0, 1]]
    assert samples.user.tolist() == [1, 0, 1, 2]
    assert load(tmp_path, label="income", columns=["work"], buckets=1, test=0).x.tolist() == [
        [1],
        [1],
        [1],
        [0],
    ]
    assert load(tmp_path, label="income", columns=["person"], user="person", test=0).x.shape == (
        4,
        3,
    )  # if it is asked for by name


def test_without_a_test_split_only_the_rows_that_stay_are_fitted_to(tmp_path: Path) -> None:
    write_table(tmp_path / "adult" / "train.parquet", {"a": list(range(40)), "label": [0, 1] * 20})
    samples = load(tmp_path, test=0.25)
    assert samples.train_rows == 30
    train = samples.x[:30].double()
    assert abs(train.mean()) < 1e-6 and abs(train.std(unbiased=False) - 1) < 1e-6
    assert abs(samples.x.double().mean()) > 1e-4  # the others had no say


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"label": "incom"}, "no column 'incom'; did you mean 'income'"),
        ({}, {"columns": ["ages"]}, "no column 'ages'; did you mean 'age'"),
        ({}, {"categorical": ["zipp"]}, "no column 'zipp'; did you mean 'zip'"),
        ({}, {"columns": ["age", "income"]}, "data.options.columns: 'income' is the label"),
        (
            {},
            {"columns": ["age"], "categorical": ["zip"]},
            "data.options.categorical: 'zip' is not one of the columns",
        ),
        ({"age": [1.0, float("-inf"), 2.0, 3.0]}, {}, "train.parquet: row 1 has an infinite number in 'age'"),
        (
            {"age": [[1]] * 4},
            {},
            (
                "'age' holds list<.*>, neither numbers nor words; list the columns to use in"
                " data.options.columns"
            ),
        ),
        ({"age": [{"y": 1}] * 4}, {}, "column 'age' holds struct<.*>, neither numbers nor words"),
        ({"age": ["x"] * 4}, {}, "test.parquet: column 'age' holds int64, but string in the train split"),
        (
            {"work": [None] * 4},
            {"columns": ["work"]},
            "test.parquet: column 'work' holds string, but null in the train split",
        ),
        (
            {"work": pa.array([None] * 4, pa.string())},
            {"columns": ["work"]},
            "no column besides 'income' has a value in the train split",
        ),
        (
            {"income": [[1]] * 4},
            {},
            "column 'income' holds list<.*>, expected whole numbers, words or booleans",
        ),
    ],
)
def test_unusable_tables_are_a_one_line_error(
    tmp_path: Path, change: dict, options: dict, message: str
) -> None:
    adult(tmp_path / "adult", **change)
    with pytest.raises(DataError, match=message) as error:
        load(tmp_path, **{"label": "income", **options})
    assert "\n" not in str(error.value)


def test_each_column_is_standardised_by_itself() -> None:
    with pytest.raises(ConfigError, match="data.options.normalise"):
        build("source", {"name": "table", "normalise": "none"}, "data.options")


def test_the_real_rows_of_wisdm_2019(real: Callable[[str], Path]) -> None:
    options: dict[str, Any] = {
        "folder": "wisdm_2019_phone_accel",
        "label": "activity",
        "columns": ["x", "y", "z", "user"],
    }
    samples = load(real("wisdm_2019_phone_accel"), **options, categorical=["user"])
    assert (
        samples.x.shape == (1433489, 25) and samples.train_rows == 1433489 - 286698 and samples.classes == 18
    )
    assert (
        torch.equal(samples.x[:, 3:].sum(1), torch.ones(1433489)) and samples.x[:, 3].sum() == 64311
    )  # rows of user 1600
    train = samples.x[: samples.train_rows, :3].double()
    assert train.mean(0).abs().max() < 1e-5 and (train.std(0) - 1).abs().max() < 1e-5


def test_the_index_of_a_pandas_frame_is_no_input(tmp_path: Path) -> None:
    (tmp_path / "adult").mkdir()
    frame = pd.DataFrame({"age": [20.0, 40.0, 30.0], "label": [0, 1, 0]}, index=[7, 9, 8])
    frame.to_parquet(tmp_path / "adult" / "train.parquet")
    frame.to_parquet(tmp_path / "adult" / "test.parquet")
    assert load(tmp_path).x.shape[1] == 1
    assert load(tmp_path, columns=["age", "__index_level_0__"]).x.shape[1] == 2  # where it is asked for
    source = build("source", {"name": "table", "folder": "adult"})
    assert source.columns_used(tmp_path) == ["age"]
    data = DataSettings(name="table", options={"folder": "adult"}, dir=str(tmp_path))
    assert columns_of(data) == ["age"] and columns_of(DataSettings()) == []
