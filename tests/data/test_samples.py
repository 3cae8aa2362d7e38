from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch

from holdfast.core.errors import DataError
from holdfast.data.federation import Samples


def colour() -> Samples:
    x = torch.arange(4 * 3 * 2 * 2, dtype=torch.uint8).view(4, 3, 2, 2)
    return Samples(x, torch.tensor([0, 1, 2, 1]), 3, 3, (0.1, 0.2, 0.3), (0.5, 0.25, 2.0), "colour")


@pytest.mark.parametrize("shape", [(), (2,), (2, 3), (0,), (2, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_normalises_by_channel_for_any_shape_of_rows(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    samples = colour()
    rows = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(1))
    mean, std = (
        torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64),
        torch.tensor([0.5, 0.25, 2.0], dtype=torch.float64),
    )
    wanted = (samples.x[rows].double() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    got = samples.batch(rows, dtype)
    assert got.dtype == dtype and got.shape == (*shape, 3, 2, 2)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-12)


def test_floats_are_not_divided_by_255_and_one_number_serves_all_channels() -> None:
    samples = Samples(torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([0, 1]), 2, 1, (1.0,), (2.0,))
    assert samples.batch(torch.tensor([1, 0])).tolist() == [[1.0, 2.0], [0.0, 0.5]]
    assert samples.sample_shape == (2,) and len(samples) == 2


def test_batch_inside_vmap_equals_batch_outside() -> None:
    samples, rows = colour(), torch.tensor([[0, 3], [2, 1]])
    assert torch.equal(torch.func.vmap(samples.batch)(rows), samples.batch(rows))


def test_bytes_stay_bytes_and_the_store_is_frozen() -> None:
    samples = colour()
    samples.batch(torch.tensor([0]))
    assert samples.to("cpu").x.dtype == torch.uint8 and samples.to("cpu").sample_shape == (3, 2, 2)
    with pytest.raises(FrozenInstanceError):
        samples.classes = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 2, dtype=torch.float64)}, "x must be uint8, float32 or"),
        ({"y": torch.zeros(3, dtype=torch.int64)}, "y must be 4 int64 labels"),
        ({"y": torch.tensor([0, 1, 2, 3])}, r"labels must be 0..2, found 0..3"),
        ({"train_rows": 5}, "train_rows is 5 but there are 4 rows"),
        ({"user": torch.zeros(2, dtype=torch.int64)}, "user must have 4 entries"),
        ({"mean": (0.0, 0.0, 0.0)}, "mean and std need 1 or 2 numbers"),
        ({"std": (0.0,)}, "std positive"),
    ],
)
def test_inconsistent_samples_are_refused(change: dict, message: str) -> None:
    sound: dict[str, Any] = {
        "x": torch.zeros(4, 2),
        "y": torch.tensor([0, 1, 2, 1]),
        "classes": 3,
        "train_rows": 3,
        "name": "sound",
    }
    Samples(**sound)
    with pytest.raises(DataError, match=message):
        Samples(**{**sound, **change})


def test_words_are_not_changed_in_a_batch():
    x = torch.tensor([[7, 2**31 - 1, 0], [1, 0, 0]], dtype=torch.int32)
    samples = Samples(x, torch.tensor([0, 1]), classes=2, train_rows=2)
    assert samples.words
    got = samples.batch(torch.tensor([[1], [0]]), torch.float64)
    assert got.dtype == torch.int64 and got.tolist() == [[[1, 0, 0]], [[7, 2**31 - 1, 0]]]


def test_there_must_be_as_many_names_as_classes():
    with pytest.raises(DataError, match="3 class names for 2 classes"):
        Samples(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), 2, 1, class_names=("a", "b", "c"))


def test_the_digest_names_what_is_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = colour()
    other = replace(whole, x=whole.x.clone().index_fill_(0, torch.tensor([2]), 9))
    same = replace(whole, x=whole.x.clone())
    stores = (whole, other, replace(whole, y=whole.y.flip(0)), replace(whole, mean=(0.0,)))
    assert whole.digest == same.digest and len({store.digest for store in stores}) == 4
    monkeypatch.setattr("holdfast.data.samples._HASHED_WHOLE", 10)
    assert (
        replace(whole, name="again").digest != replace(other, name="again").digest
    )  # few rows: all are hashed all the same
    monkeypatch.setattr("holdfast.data.samples._HASHED_ROWS", 2)
    first, last = (replace(whole, x=whole.x.clone().index_fill_(0, torch.tensor([row]), 9)) for row in (0, 3))
    assert len({replace(whole, name="few").digest, first.digest, last.digest}) == 3
