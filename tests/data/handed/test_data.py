"""Data handed over in Python: what is understood, and what is refused, with the client's name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from holdfast.core.errors import ConfigError, DataError
from holdfast.data.federation import DataSettings, load_samples
from holdfast.data.handed.data import Data
from holdfast.data.samples import Samples

X = np.arange(12.0).reshape(6, 2)
Y = np.array([0, 1, 0, 1, 0, 1])


def samples_of(data: Data) -> Samples:
    return load_samples(DataSettings(**data.section()))


def test_clients_hold_what_is_given_for_them_and_are_tested_on_their_own_test_sets() -> None:
    data = Data(clients=[(X, Y), (X + 100, Y, X[:2] + 200, Y[:2])])
    federation = data.federation()
    assert federation.train.counts.tolist() == [4, 6]  # a quarter of client 0's six is set aside
    assert federation.test.counts.tolist() == [2, 2]
    assert sorted(federation.train.client(1)[0].tolist()) == [6, 7, 8, 9, 10, 11]
    assert federation.test.client(1)[0].tolist() == [12, 13]
    assert samples_of(data).x[12].tolist() == [200, 201]


def test_columns_are_normalised_by_the_training_samples_of_all_clients() -> None:
    samples = samples_of(Data(clients=[(X[:2], Y[:2]), (X[2:4], Y[2:4], X[4:], Y[4:])]))
    assert samples.mean == (3.0, 4.0)  # columns 0, 2, 4, 6 and 1, 3, 5, 7
    assert samples.std == pytest.approx((5**0.5, 5**0.5))
    assert samples.batch(torch.tensor([0]))[0, 0].item() == pytest.approx(-3 / 5**0.5)


@pytest.mark.parametrize(
    ("x", "dtype", "shape"),
    [
        (np.zeros((6, 8, 9), np.uint8), torch.uint8, (1, 8, 9)),
        (np.zeros((6, 8, 9, 3), np.uint8), torch.uint8, (3, 8, 9)),
        (np.zeros((6, 3, 8, 9), np.uint8), torch.uint8, (3, 8, 9)),
        (np.zeros((6, 8, 9), np.int64), torch.uint8, (1, 8, 9)),
        (np.zeros((6, 8, 9, 1)), torch.float32, (1, 8, 9)),
        (np.zeros((6, 3, 50)), torch.float32, (3, 50)),
        (torch.zeros(6, 4, dtype=torch.bfloat16), torch.float32, (4,)),
        (np.ones((6, 7), np.int64), torch.int32, (7,)),
        ([[1], [2, 3], [4], [5], [6], [7]], torch.int32, (2,)),
        (["one", "two words", "", "four", "five", "six"], torch.int32, (128,)),
        ([1.0, 2, 3, 4, 5, 6], torch.float32, (1,)),
    ],
)
def test_samples_are_stored_as_networks_read_them(x: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    samples = samples_of(Data(x, Y))
    assert (samples.x.dtype, samples.sample_shape) == (dtype, shape)


def test_an_array_of_the_right_type_is_not_copied() -> None:
    x = np.zeros((6, 2), np.float32)
    assert np.shares_memory(samples_of(Data(x, Y)).x.numpy(), x)


@pytest.mark.parametrize(
    ("labels", "numbers", "names"),
    [
        (["b", "a", "b"], [1, 0, 1], ("a", "b")),
        ([True, False, True], [1, 0, 1], ("false", "true")),
        ([2.0, 0.0, 1.0], [2, 0, 1], ()),
        (torch.tensor([[1], [0], [0]]), [1, 0, 0], ()),
        (pd.Series(["x", "y", "x"], dtype="category"), [0, 1, 0], ("x", "y")),
    ],
)
def test_labels_are_numbers_words_or_booleans(
    labels: Any, numbers: list[int], names: tuple[str, ...]
) -> None:
    samples = samples_of(Data(X[:3], labels))
    assert samples.y.tolist() == numbers
    assert samples.class_names == names


def test_classes_are_counted_over_all_clients() -> None:
    samples = samples_of(Data(clients={"a": (X, ["cat"] * 6), "b": (X, ["ant"] * 6)}))
    assert samples.class_names == ("ant", "cat")
    assert samples.y.tolist() == [1] * 6 + [0] * 6


BAD = [
    ((X[:, :1], Y), "client 'b' has samples of shape 1, but those of client 'a' are 2"),
    ((X.astype(np.uint8), Y), "client 'b' has samples of uint8, but those of client 'a' are float64"),
    ((X, Y[:4]), "client 'b' has 6 samples, but 4 labels"),
    ((X[:0], Y[:0]), "client 'b' has no samples"),
    ((np.where(X == 5, np.nan, X), Y), "sample 2 of client 'b' has nan, which is not a finite number"),
    ((X * 1e300, Y), "sample 0 of client 'b' has 1e\\+300, which is not a finite number"),
    ((X, Y - 1), "client 'b' has label -1 in row 0; expected whole numbers from 0 on"),
    ((X, Y + 0.5), "client 'b' has label 0.5 in row 0"),
    ((X, list("ababab")), "client 'b' has labels that are words, but those of client 'a' are numbers"),
    ((X, np.eye(6)), "client 'b' has labels of shape \\(6, 6\\).*y.argmax"),
    ((X, [object()] * 6), "client 'b' has labels of object; give numbers or words"),
    ((X, Y, X[:2, :1], Y[:2]), "the test set of client 'b' has samples of shape 1"),
    ((X, Y, X[:2]), "client 'b' is a tuple of 3; give \\(X, y\\)"),
    (["one", "two"], "client 'b'"),
    (pd.DataFrame({"u": [1.0], "target_": [1]}), "client 'b' has no column 'label'.*it has u, target_"),
]


@pytest.mark.parametrize(("entry", "said"), BAD)
def test_an_error_names_the_client(entry: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        Data(clients={"a": (X, Y), "b": entry})


def test_a_class_that_nobody_trains_on_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="the test set of client 1 has class 2, which no client trains on"):
        Data(clients=[(X, Y), (X, Y, X[:2], [0, 2])])


def test_a_client_with_fewer_samples_than_the_split_needs_is_named() -> None:
    data = Data(clients={"a": (X, Y), "b": (X[:1], Y[:1])})
    with pytest.raises(
        DataError, match="client 'b' has 1 sample, but data.split needs one each for training and"
    ):
        data.federation()
    Data(clients={"a": (X, Y), "b": (X[:1], Y[:1], X[:2], Y[:2])}).federation()


def test_settings_and_names_of_clients_are_told_apart() -> None:
    assert DataSettings.model_validate({"clients": 3}).clients == 3
    assert DataSettings.model_validate({"Rome": (X, Y), "Oslo": (X, Y)}).names == ("Rome", "Oslo")
    with pytest.raises(ConfigError, match="'root' is a setting .*holdfast.Data\\(clients=...\\)"):
        DataSettings.model_validate({"root": (X, Y), "Oslo": (X, Y)})
    with pytest.raises(ConfigError, match="this is one dataset; write data=holdfast.Data\\(X, y"):
        DataSettings.model_validate((X, Y))


@pytest.mark.parametrize("wrong", [None, (X, Y, X)])
def test_one_wrong_entry_of_two_is_named(wrong: Any) -> None:
    with pytest.raises(DataError, match="data: client 1 is a"):
        DataSettings.model_validate([(X, Y), wrong])


def test_one_dataset_is_divided_by_a_partition() -> None:
    data = Data(
        np.tile(X, (10, 1)),
        np.tile(Y, 10),
        test=(X, Y),
        partition="iid",
        clients=4,
        split={"train": 1, "test": 0},
    )
    assert data.federation().train.counts.tolist() == [17, 17, 16, 16]  # 60 + 6 samples
    assert "4 clients, partition iid; 60 samples for training and 6 for testing" in repr(data)


def test_users_are_clients_and_words_are_their_names() -> None:
    data = Data(X, Y, users=["u", "u", "u", "v", "v", "v"], partition="by-user")
    assert data.federation().train.counts.tolist() == [2, 2]
    assert data.settings().names == ("u", "v")


def test_the_name_of_a_dataset_is_data_and_a_bare_array_is_not() -> None:
    assert DataSettings.model_validate("synthetic").name == "synthetic"
    with pytest.raises(ConfigError, match="data: cannot read a ndarray; give a list with one entry"):
        DataSettings.model_validate(X)


def test_bytes_and_floats_are_not_mixed_where_the_kind_is_given() -> None:
    images = np.zeros((6, 4, 4), np.uint8)
    with pytest.raises(DataError, match="client 1 has samples of float64, but those of client 0 are uint8"):
        Data(clients=[(images, Y), (images / 255.0, Y)], kind="images")


def test_its_picture_is_a_figure() -> None:
    matplotlib = pytest.importorskip("matplotlib.figure")
    data = Data(clients={"Bonn": (X, Y), "Cork": (X, Y)})
    figure = data.plot()
    assert isinstance(figure, matplotlib.Figure) and figure._repr_png_().startswith(b"\x89PNG")
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["Bonn", "Cork"]
    axes = matplotlib.Figure().subplots()
    assert data.plot(ax=axes) is axes.figure
