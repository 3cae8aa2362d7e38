"""CIFAR: colour photographs of 32 x 32 pixels."""

from __future__ import annotations

from typing import ClassVar, Literal

from holdfast.core.registry import register, setting
from holdfast.data.decode_image import ImageFormat
from holdfast.data.images import COLUMNS
from holdfast.data.sources.base import REPO_HELP
from holdfast.data.sources.images import ImageSource


@register(
    "source", "cifar10", paper="Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009"
)
class Cifar10(ImageSource):
    """CIFAR-10: 50,000 + 10,000 photographs, 32 x 32 in colour, 10 classes.

    Columns img, label. Licence: none stated; its author asks to cite the report.
    """

    classes: ClassVar[int | None] = 10
    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)
    also: ClassVar[tuple[str, ...]] = ("cifar-10",)
    repo: str | None = setting("uoft-cs/cifar10", REPO_HELP)

    def _image_format(self) -> ImageFormat:
        return ImageFormat("colour", shape=(32, 32))


@register(
    "source", "cifar100", paper="Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009"
)
class Cifar100(ImageSource):
    """CIFAR-100: 50,000 + 10,000 photographs, 32 x 32 in colour, 100 classes in 20 coarse ones.

    Columns img, fine_label, coarse_label. Licence: none stated; its author asks to cite the report.
    """

    mean: ClassVar[tuple[float, ...]] = (0.5071, 0.4865, 0.4409)
    std: ClassVar[tuple[float, ...]] = (0.2673, 0.2564, 0.2762)
    also: ClassVar[tuple[str, ...]] = ("cifar-100",)
    repo: str | None = setting("uoft-cs/cifar100", REPO_HELP)
    labels: Literal["fine", "coarse"] = setting("fine", "fine: 100 classes; coarse: the 20 groups of them")

    def _columns(self) -> tuple[tuple[str, ...], str, str | None]:
        return COLUMNS, f"{self.labels}_label", None

    def _classes(self) -> int:
        return 100 if self.labels == "fine" else 20

    def _image_format(self) -> ImageFormat:
        return ImageFormat("colour", shape=(32, 32))
