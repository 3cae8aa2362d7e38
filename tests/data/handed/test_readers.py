"""Entries of other libraries: torch datasets, pandas frames, Hugging Face datasets."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from holdfast.core.errors import DataError
from holdfast.data.federation import DataSettings, load_samples
from holdfast.data.handed.data import Data
from holdfast.data.samples import Samples


def samples_of(data: Data) -> Samples:
    return load_samples(DataSettings(**data.section()))


class Squares(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return torch.full((2, 3), float(row)), row % 2


class Stream(IterableDataset[int]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        yield 1


def test_a_torch_dataset_is_read_through_once() -> None:
    samples = samples_of(Data(clients=[Squares(), (Squares(), Squares())]))
    assert samples.x[:, 0, 0].tolist() == [0, 1, 2, 3, 4] * 3
    assert samples.y.tolist() == [0, 1, 0, 1, 0] * 3
    assert samples.train_rows == 10
    with pytest.raises(DataError, match="client 0 is a Stream without a length; give a map-style Dataset"):
        Data(clients=[Stream()])


def test_a_tensor_dataset_is_not_copied() -> None:
    x = torch.zeros(4, 2)
    assert samples_of(Data(TensorDataset(x, torch.tensor([0, 1, 0, 1])))).x.data_ptr() == x.data_ptr()


def test_columns_of_frames_are_encoded_by_the_training_rows_of_all_clients() -> None:
    first = pd.DataFrame({"age": [10.0, 20.0], "town": ["Oslo", "Rome"], "label": ["no", "yes"]})
    second = pd.DataFrame({"age": [30.0, None], "town": ["Rome", "Rome"], "label": ["no", "no"]})
    samples = samples_of(Data(clients=[first, second]))
    spread = (200 / 3) ** 0.5  # of 10, 20, 30
    assert samples.x[:, 0].tolist() == pytest.approx([-10 / spread, 0, 10 / spread, 0])
    assert samples.x[:, 1:].tolist() == [[1, 0], [0, 1], [0, 1], [0, 1]]
    with pytest.raises(DataError, match="client 1 lacks the column 'town'"):
        Data(clients=[first, second[["age", "label"]]])


def test_a_hugging_face_dataset_brings_its_columns_and_class_names() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "id": datasets.Value("int64"),
            "label": datasets.ClassLabel(names=["neg", "pos"]),
        }
    )
    made = datasets.Dataset.from_dict(
        {"text": ["good", "bad"], "id": [7, 8], "label": [1, 0]}, features=features
    )
    samples = samples_of(Data(clients=[made, made], words=4))
    assert samples.words and samples.sample_shape == (4,)
    assert samples.class_names == ("neg", "pos") and samples.y.tolist() == [1, 0, 1, 0]
    table = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0]], "kind": ["a", "b"]})
    assert samples_of(Data(table, label="kind")).x.tolist() == [[1, 2], [3, 4]]


def test_images_of_a_hugging_face_dataset_are_decoded() -> None:
    datasets = pytest.importorskip("datasets")
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    made = datasets.Dataset.from_dict(
        {"image": [image.fromarray(one) for one in pixels], "label": [0, 1]},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")}),
    )
    assert np.array_equal(samples_of(Data(made)).x.numpy(), pixels.transpose(0, 3, 1, 2))
