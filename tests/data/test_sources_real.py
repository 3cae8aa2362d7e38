"""The loaders on the real files, where there are some: counts, and a few labels and pixels that are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.core.registry import build

pytest.importorskip("pyarrow")
pytest.importorskip("PIL", reason="needs Pillow")


def load(name: str, dir: Path, **options: Any) -> Any:
    return build("source", {"name": name, **options}).load(dir)


@pytest.mark.parametrize(
    ("name", "shape", "first", "mean", "per_class"),
    [
        (
            "mnist",
            (1, 28, 28),
            [7, 2, 1, 0, 4, 1, 4, 9],
            [0.1325],
            [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
        ),
        ("fashion-mnist", (1, 28, 28), [9, 2, 1, 1, 6, 1, 4, 6], [0.2868], [1000] * 10),
        ("cifar10", (3, 32, 32), [3, 8, 8, 0, 6, 6, 1, 6], [0.4942, 0.4851, 0.4504], [1000] * 10),
    ],
)
def test_the_real_test_splits(
    real_data: Path,
    tmp_path: Path,
    name: str,
    shape: tuple[int, ...],
    first: list[int],
    mean: list[float],
    per_class: list[int],
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "train.parquet").symlink_to(real_data / name.replace("-", "_") / "test.parquet")
    samples = load(name, tmp_path, test=0)
    assert (
        samples.x.shape == (10000, *shape) and samples.x.dtype == torch.uint8 and samples.train_rows == 10000
    )
    assert samples.y[:8].tolist() == first and torch.bincount(samples.y).tolist() == per_class
    np.testing.assert_allclose(samples.x.double().mean((0, 2, 3)) / 255, mean, atol=1e-4)


@pytest.mark.slow
def test_cifar100_fine_and_coarse(real_data: Path) -> None:
    if not (real_data / "cifar100").is_dir():
        pytest.skip("no cifar100 there")
    fine, coarse = load("cifar100", real_data), load("cifar100", real_data, labels="coarse")
    assert fine.x.shape[1:] == (3, 32, 32) and torch.equal(fine.x[:100], coarse.x[:100])
    assert (
        len(torch.bincount(fine.y[: fine.train_rows]).unique()) == 1
        and len(torch.bincount(coarse.y).unique()) == 1
    )
    names = {
        (fine.class_names[f], coarse.class_names[c])
        for f, c in zip(fine.y.tolist(), coarse.y.tolist(), strict=True)
    }
    assert len(names) == 100  # every fine class lies in one coarse class
    assert {("rose", "flowers"), ("whale", "aquatic_mammals"), ("tractor", "vehicles_2")} <= names


def test_tiny_imagenet_keeps_200_labels_and_some_grey_photographs(real_data: Path) -> None:
    if not (real_data / "tiny_imagenet").is_dir():
        pytest.skip("no tiny_imagenet there")
    samples = load("tiny-imagenet", real_data)
    assert (
        samples.sample_shape == (3, 64, 64)
        and samples.classes == 200
        and samples.class_names[0] == "n01443537"
    )
    assert samples.y[:250].unique().tolist() == [0] and int(samples.y.max()) < 200  # sorted by class
    grey = (samples.x[:, 0] == samples.x[:, 1]).flatten(1).all(1) & (
        samples.x[:, 0] == samples.x[:, 2]
    ).flatten(1).all(1)
    assert 0 < int(grey.sum()) < len(samples) / 10


def test_grey_images_stored_as_colour_are_detected(real_data: Path, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "all.parquet").symlink_to(real_data / "mnist" / "test.parquet")
    samples = load("images", tmp_path, folder="own")
    assert (
        samples.x.shape == (10000, 1, 28, 28)
        and samples.train_rows == 8000
        and samples.class_names == tuple("0123456789")
    )
    np.testing.assert_allclose(samples.mean, [0.1325], atol=2e-3)  # of other rows than all


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "train_rows", "first", "pixel", "counts"),
    [
        (
            "mnist",
            60000,
            [5, 0, 4, 1, 9],
            ((0, 0, 5, 13), 18),
            [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        ),
        ("fashion-mnist", 60000, [9, 0, 0, 3, 0], ((0, 0, 5, 14), 102), [6000] * 10),
        ("cifar10", 50000, [6, 9, 9, 4, 1], ((0, 2, 0, 0), 63), [5000] * 10),
    ],
)
def test_whole_datasets_have_their_published_sizes(
    real_data: Path, name: str, train_rows: int, first: list[int], pixel: Any, counts: list[int]
) -> None:
    samples = load(name, real_data)
    assert samples.train_rows == train_rows and len(samples) == train_rows + 10000
    assert samples.y[:5].tolist() == first and torch.bincount(samples.y[:train_rows]).tolist() == counts
    place, value = pixel
    assert samples.x[place] == value
    train = samples.x[:train_rows].double() / 255
    np.testing.assert_allclose(train.mean((0, 2, 3)), samples.mean, atol=1e-4)
    np.testing.assert_allclose(train.std((0, 2, 3)), samples.std, atol=1e-4)
