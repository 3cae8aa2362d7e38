"""Where samples come from. A source is chosen by data.name, set by data.options, and returns Samples.

To add one: subclass Source, register it under a name, return Samples from load.
"""

from __future__ import annotations

import gzip
from importlib.resources import files
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from holdfast.core.errors import DataError
from holdfast.core.keys import Key
from holdfast.core.registry import Part, register, setting
from holdfast.data.cache import cached
from holdfast.data.images import read_images
from holdfast.data.lookup import find_folder
from holdfast.data.samples import Samples


class Source(Part):
    """What every source can be set to."""

    mean: ClassVar[tuple[float, ...]] = (0.5,)
    std: ClassVar[tuple[float, ...]] = (0.5,)
    normalise: Literal["dataset", "half", "none"] = setting(
        "dataset", "by the train split's own mean and deviation; half: mean and deviation 0.5, as PFLlib, FedCAP and FedAS do; none: 0..1"
    )

    def load(self, dir: Path | None) -> Samples:
        raise TypeError(f"source '{self.name}' does not say how to load")

    def _samples(self, x: np.ndarray, y: np.ndarray, classes: int, train_rows: int) -> Samples:
        mean, std = {"dataset": (self.mean, self.std), "half": ((0.5,), (0.5,)), "none": ((0.0,), (1.0,))}[self.normalise]
        return Samples(torch.from_numpy(x), torch.from_numpy(y), classes, train_rows, mean, std, self.name)


@register("source", "digits", paper="Alpaydin and Kaynak: Optical Recognition of Handwritten Digits, UCI, 1998")
class Digits(Source):
    """1,797 handwritten digits of 8 x 8 pixels, embedded: 1,437 train, 360 test, in the original order.

    Origin: the test set of UCI's "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998), the file digits.csv.gz
    of scikit-learn, unchanged. Licence: CC BY 4.0. Its grey values 0..16 are stretched to 0..255, so that white is white everywhere.
    """

    mean: ClassVar[tuple[float, ...]] = (0.3054,)
    std: ClassVar[tuple[float, ...]] = (0.3753,)

    def load(self, dir: Path | None) -> Samples:
        text = gzip.decompress((files("holdfast.data") / "digits.csv.gz").read_bytes()).decode()
        table = np.array([line.split(",") for line in text.split()], dtype=np.int64)
        x = np.round(table[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
        return self._samples(x, np.ascontiguousarray(table[:, 64]), classes=10, train_rows=1437)


class ParquetImages(Source):
    """Images from a folder DIR/NAME with train.parquet and test.parquet, as on the Hub."""

    mode: ClassVar[Literal["L", "RGB"]] = "RGB"
    classes: ClassVar[int] = 10

    def load(self, dir: Path | None) -> Samples:
        folder = find_folder(self.name, dir)
        paths = [folder / "train.parquet", folder / "test.parquet"]

        def decode() -> dict[str, np.ndarray]:
            parts = [read_images(path, self.mode) for path in paths]
            if parts[0][0].shape[1:] != parts[1][0].shape[1:]:
                raise DataError(f"{folder}: train images are {parts[0][0].shape[1:]}, test images {parts[1][0].shape[1:]}")
            return {
                "x": np.concatenate([x for x, _ in parts]),
                "y": np.concatenate([y for _, y in parts]),
                "train_rows": np.array(len(parts[0][1])),
            }

        arrays = cached(f"{self.name}-{self.mode}", paths, decode)
        return self._samples(arrays["x"], arrays["y"], self.classes, int(arrays["train_rows"]))


@register("source", "mnist", paper="LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to document recognition, 1998")
class Mnist(ParquetImages):
    """MNIST: 60,000 + 10,000 handwritten digits, 28 x 28 grey, from a Parquet folder."""

    mode: ClassVar[Literal["L", "RGB"]] = "L"
    mean: ClassVar[tuple[float, ...]] = (0.1307,)
    std: ClassVar[tuple[float, ...]] = (0.3081,)


@register("source", "fashion-mnist", paper="Xiao, Rasul, Vollgraf: Fashion-MNIST, 2017")
class FashionMnist(ParquetImages):
    """Fashion-MNIST: 60,000 + 10,000 articles of clothing, 28 x 28 grey, from a Parquet folder."""

    mode: ClassVar[Literal["L", "RGB"]] = "L"
    mean: ClassVar[tuple[float, ...]] = (0.2860,)
    std: ClassVar[tuple[float, ...]] = (0.3530,)


@register("source", "cifar10", paper="Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009")
class Cifar10(ParquetImages):
    """CIFAR-10: 50,000 + 10,000 photographs, 32 x 32 in colour, from a Parquet folder."""

    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)


@register("source", "synthetic")
class Synthetic(Source):
    """Gaussian blobs, one per class, as bytes: for tests and timings, made from a seed of its own."""

    mean: ClassVar[tuple[float, ...]] = (128 / 255,)
    std: ClassVar[tuple[float, ...]] = (32 / 255,)
    samples: int = setting(2000, "rows in all", ge=1)
    test: float = setting(0.2, "share of rows in the test split", ge=0, lt=1)
    shape: tuple[int, ...] = setting((1, 28, 28), "of one sample", min_length=1)
    classes: int = setting(10, "number of blobs, of equal size", ge=1)
    separation: float = setting(6.0, "expected distance of two blobs' centres in deviations of the noise", ge=0)
    seed: int = setting(0, "of the blobs; not the experiment's")

    def load(self, dir: Path | None) -> Samples:
        if min(self.shape) < 1:
            raise DataError(f"data.options.shape: every side must be 1 or more (got {list(self.shape)})")
        key, width = Key(self.seed).fold("synthetic"), int(np.prod(self.shape))
        y = key.fold("labels").numpy().permutation(np.arange(self.samples) % self.classes)
        centres = key.fold("centres").numpy().standard_normal((self.classes, width), dtype=np.float32)
        centres *= self.separation / np.sqrt(2 * width)
        x = np.empty((self.samples, width), dtype=np.uint8)
        noise = key.fold("noise").numpy()
        for begin in range(0, self.samples, 4096):  # in pieces: the floats of 70,000 images would need four times the bytes
            rows = y[begin : begin + 4096]
            blob = centres[rows] + noise.standard_normal((len(rows), width), dtype=np.float32)
            x[begin : begin + 4096] = np.clip(np.round(128 + 32 * blob), 0, 255)
        return self._samples(x.reshape(-1, *self.shape), y, self.classes, self.samples - int(self.samples * self.test))
