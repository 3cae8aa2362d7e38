"""A small ImageNet."""

from __future__ import annotations

from typing import ClassVar

from holdfast.core.registry import register, setting
from holdfast.data.decode_image import ImageFormat
from holdfast.data.sources.base import REPO_HELP
from holdfast.data.sources.images import ImageSource


@register("source", "tiny-imagenet", paper="Le, Yang: Tiny ImageNet Visual Recognition Challenge, 2015")
class TinyImagenet(ImageSource):
    """Tiny ImageNet: 100,000 + 10,000 photographs, 64 x 64 in colour, 200 classes.

    Columns image, label. The labelled validation split is the test split; some photographs are grey and come
    as three equal channels. Licence: ImageNet's terms, non-commercial research.

    """

    classes: ClassVar[int | None] = 200
    mean: ClassVar[tuple[float, ...]] = (0.4802, 0.4481, 0.3975)
    std: ClassVar[tuple[float, ...]] = (0.2770, 0.2691, 0.2821)
    repo: str | None = setting("zh-plus/tiny-imagenet", REPO_HELP)

    def _image_format(self) -> ImageFormat:
        return ImageFormat("colour", shape=(64, 64))
