from __future__ import annotations

import builtins
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.core.errors import DataError
from holdfast.core.registry import build, describe, parts
from holdfast.data.sources import images as image_sources
from tests.data.folders import colour, grey, write_images


def load(name: str, dir: Path | None = None, **options: Any) -> Any:
    return build("source", {"name": name, **options}).load(dir)


def test_digits_known_labels_and_pixels() -> None:
    digits = load("digits")
    assert (
        digits.x.shape == (1797, 1, 8, 8)
        and digits.x.dtype == torch.uint8
        and digits.train_rows == 1437
        and digits.classes == 10
    )
    assert digits.y[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1] and digits.y[-5:].tolist() == [
        9,
        0,
        8,
        9,
        8,
    ]
    assert torch.bincount(digits.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    grey = (digits.x.double() * 16 / 255).round().long()
    assert grey[0, 0, :2].tolist() == [[0, 0, 5, 13, 9, 1, 0, 0], [0, 0, 13, 15, 10, 15, 5, 0]]
    assert grey.sum() == 561718 and grey.max() == 16 and digits.x.max() == 255


def test_digits_are_normalised_by_their_train_split() -> None:
    train = load("digits").batch(torch.arange(1437))
    assert abs(train.mean()) < 1e-3 and abs(train.std() - 1) < 1e-3
    half, none = load("digits", normalise="half"), load("digits", normalise="none")
    assert half.batch(torch.arange(9)).min() == -1 and half.batch(torch.arange(9)).max() == 1
    assert none.batch(torch.arange(9)).min() == 0 and none.batch(torch.arange(9)).max() == 1


def test_synthetic_is_deterministic_balanced_and_separable() -> None:
    one, same, other = load("synthetic"), load("synthetic"), load("synthetic", seed=1)
    assert one.x.shape == (2000, 1, 28, 28) and one.x.dtype == torch.uint8 and one.train_rows == 1600
    assert torch.equal(one.x, same.x) and torch.equal(one.y, same.y) and not torch.equal(one.x, other.x)
    assert torch.bincount(one.y).tolist() == [200] * 10
    x = one.batch(torch.arange(2000)).flatten(1)
    centres = torch.stack([x[:1600][one.y[:1600] == label].mean(0) for label in range(10)])
    guess = torch.cdist(x[1600:], centres).argmin(1)
    assert 0.8 < (guess == one.y[1600:]).float().mean() <= 1
    small = load("synthetic", samples=30, shape=[5], classes=3, test=0.5)
    assert small.sample_shape == (5,) and small.train_rows == 15 and small.classes == 3


def test_synthetic_refuses_an_empty_shape() -> None:
    with pytest.raises(DataError, match="data.options.shape: every side must be 1 or more"):
        load("synthetic", shape=[1, 0])


@pytest.mark.parametrize("name", ["digits", "mnist", "fashion-mnist", "cifar10", "synthetic"])
def test_every_source_is_documented(name: str) -> None:
    card = describe(parts("source")[name])
    assert card["summary"] and all(item["help"] for item in card["settings"])


# ---- Parquet folders, written small here ----


@pytest.mark.parametrize(
    ("folder", "column", "kind", "wrap"), [("mnist", "image", "PNG", True), ("mnist", "img", "WEBP", False)]
)
def test_grey_images_are_loaded(tmp_path: Path, folder: str, column: str, kind: str, wrap: bool) -> None:
    images, labels = grey(), list(range(8))
    stored = (
        [np.repeat(pixels[:, :, None], 3, 2) for pixels in images] if kind == "WEBP" else images
    )  # WebP knows no grey
    write_images(tmp_path / folder, stored, labels, column, kind, wrap)
    samples = load("mnist", tmp_path)
    assert samples.x.shape == (8, 1, 28, 28) and samples.train_rows == 6 and samples.y.tolist() == labels
    assert np.array_equal(samples.x[:, 0].numpy(), np.stack(images))


def test_colour_images_channels_first(tmp_path: Path) -> None:
    images = colour()
    write_images(tmp_path / "cifar10", images, [3] * 8, "img")
    samples = load("cifar10", tmp_path)
    assert samples.x.shape == (8, 3, 32, 32) and np.array_equal(
        samples.x.numpy(), np.stack(images).transpose(0, 3, 1, 2)
    )
    assert samples.mean == (0.4914, 0.4822, 0.4465)


@pytest.mark.parametrize("folder", ["fashion-mnist", "fashion_mnist"])
def test_folder_from_the_environment_with_either_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    write_images(tmp_path / folder, grey(), [0] * 8)
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path))
    assert len(load("fashion-mnist")) == 8
    assert (
        len(load("fashion-mnist", tmp_path / "elsewhere")) == 8
    )  # data.dir does not serve, the environment does


def test_images_are_decoded_once_and_again_when_a_file_changes(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "mnist", grey(), [1] * 8)
    first = load("mnist", tmp_path)
    assert sorted(path.name for path in own_cache.rglob("*") if path.is_file()) == [
        "facts.json",
        "x.npy",
        "y.npy",
    ]  # nothing temporary
    with monkeypatch.context() as patch:
        patch.setattr(image_sources, "decode_images", lambda *_: pytest.fail("decoded again"))
        again = load("mnist", tmp_path)
    assert torch.equal(first.x, again.x) and torch.equal(first.y, again.y) and again.train_rows == 6
    write_images(tmp_path / "mnist", grey(), [2] * 8)
    os.utime(tmp_path / "mnist" / "train.parquet", ns=(1, 1))
    assert load("mnist", tmp_path).y.tolist() == [2] * 8


def test_a_damaged_cache_is_made_again(tmp_path: Path, own_cache: Path) -> None:
    write_images(tmp_path / "mnist", grey(), [1] * 8)
    load("mnist", tmp_path)
    stored = next(own_cache.rglob("x.npy"))
    stored.write_bytes(stored.read_bytes()[:300])
    assert torch.equal(load("mnist", tmp_path).x[0, 0], torch.from_numpy(grey()[0]))
    assert stored.stat().st_size > 300


def test_a_cache_that_cannot_be_written_is_not_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "mnist", grey(), [1] * 8)
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    monkeypatch.setenv(
        "HOLDFAST_CACHE", str(blocked / "cache")
    )  # also for root, who may write read-only folders
    assert len(load("mnist", tmp_path)) == 8


@pytest.mark.parametrize(
    ("images", "labels", "column", "message"),
    [
        ([*grey(7), b"no image"], [0] * 8, "image", "test.parquet: row 1 is not a readable image"),
        ([*grey(4), None, *grey(3)], [0] * 8, "image", "train.parquet: row 4 holds no image bytes"),
        (
            [*grey(5), *grey(1, side=20), *grey(2)],
            [0] * 8,
            "image",
            r"train.parquet: row 5 is 20 x 20; expected 28 x 28",
        ),
        ([*grey(6), *grey(2, side=20)], [0] * 8, "image", "test.parquet: row 0 is 20 x 20; expected 28 x 28"),
        (grey(), [0] * 7 + [None], "image", "test.parquet: row 1 has no value in 'label'"),
        (
            grey(),
            [0] * 7 + [10],
            "image",
            r"test.parquet: row 1 has label 10 in 'label', expected whole numbers 0..9",
        ),
        (grey(), [0] * 8, "imago", "no column 'image' or 'img'; did you mean 'imago'"),
    ],
)
def test_damaged_images_name_file_and_row(
    tmp_path: Path, images: list[Any], labels: list[Any], column: str, message: str
) -> None:
    write_images(tmp_path / "mnist", images, labels, column)
    with pytest.raises(DataError, match=message):
        load("mnist", tmp_path)


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    write_images(tmp_path / "mnist", grey(), [0] * 8)
    (tmp_path / "mnist" / "test.parquet").write_bytes(b"half a download")
    with pytest.raises(DataError, match="test.parquet cannot be read as Parquet, download it again"):
        load("mnist", tmp_path)


def test_without_pillow_the_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "mnist", [b"x"] * 8, [0] * 8)  # type: ignore[list-item]
    real_import = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "PIL":
            raise ImportError(name)
        return real_import(name, *args)

    monkeypatch.delitem(sys.modules, "PIL", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match="image datasets need Pillow; run pip install pillow"):
        load("mnist", tmp_path)
