"""The MNIST family: grey characters and clothes of 28 x 28 pixels."""

from __future__ import annotations

import string
from typing import ClassVar

from holdfast.core.registry import register, setting
from holdfast.data.decode_image import ImageFormat
from holdfast.data.sources.base import REPO_HELP
from holdfast.data.sources.images import ImageSource


@register(
    "source",
    "mnist",
    paper="LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to document recognition, 1998",
)
class Mnist(ImageSource):
    """MNIST: 60,000 + 10,000 handwritten digits, 28 x 28 grey, 10 classes.

    Columns image, label. Licence: none stated by its authors (LeCun, Cortes, Burges).
    """

    classes: ClassVar[int | None] = 10
    mean: ClassVar[tuple[float, ...]] = (0.1307,)
    std: ClassVar[tuple[float, ...]] = (0.3081,)
    repo: str | None = setting("ylecun/mnist", REPO_HELP)

    def _image_format(self) -> ImageFormat:
        return ImageFormat("grey", shape=(28, 28))


@register("source", "fashion-mnist", paper="Xiao, Rasul, Vollgraf: Fashion-MNIST, 2017")
class FashionMnist(ImageSource):
    """Fashion-MNIST: 60,000 + 10,000 articles of clothing, 28 x 28 grey, 10 classes.

    Columns image, label. Licence: MIT (Zalando SE).
    """

    classes: ClassVar[int | None] = 10
    mean: ClassVar[tuple[float, ...]] = (0.2860,)
    std: ClassVar[tuple[float, ...]] = (0.3530,)
    repo: str | None = setting("zalando-datasets/fashion_mnist", REPO_HELP)

    def _image_format(self) -> ImageFormat:
        return ImageFormat("grey", shape=(28, 28))


@register(
    "source",
    "emnist",
    paper="Cohen, Afshar, Tapson, van Schaik: EMNIST: an extension of MNIST to handwritten letters, 2017",
)
class Emnist(ImageSource):
    """EMNIST ByClass: 697,932 + 116,323 handwritten characters, 28 x 28 grey, 62 classes: 0-9, A-Z, a-z.

    The original files store every character with rows and columns exchanged; here they are turned upright,
    like MNIST's digits. Columns image, label. Licence: NIST Special Database 19, a work of the US government,
    without a licence of its own.

    """

    classes: ClassVar[int | None] = 62
    names: ClassVar[tuple[str, ...]] = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
    mean: ClassVar[tuple[float, ...]] = (0.1736,)
    std: ClassVar[tuple[float, ...]] = (0.3317,)
    also: ClassVar[tuple[str, ...]] = ("emnist-byclass",)
    repo: str | None = setting("Royc30ne/emnist-byclass", REPO_HELP)
    upright: bool = setting(
        True,
        "exchange rows and columns, because the original files store them exchanged; false for upright files",
    )

    def _image_format(self) -> ImageFormat:
        return ImageFormat("grey", shape=(28, 28), transposed=self.upright)
