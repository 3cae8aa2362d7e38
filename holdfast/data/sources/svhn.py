"""House numbers from street photographs."""

from __future__ import annotations

from typing import ClassVar

from holdfast.core.registry import register, setting
from holdfast.data.decode_image import ImageFormat
from holdfast.data.sources.base import REPO_HELP
from holdfast.data.sources.images import ImageSource


@register(
    "source",
    "svhn",
    paper="Netzer et al.: Reading Digits in Natural Images with Unsupervised Feature Learning, 2011",
)
class Svhn(ImageSource):
    """SVHN, cropped digits: 73,257 + 26,032 photographs of house numbers, 32 x 32 in colour, 10 classes.

    Columns image, label. The 531,131 easier ones of the split `extra` are left out. Licence: for
    non-commercial use.

    """

    classes: ClassVar[int | None] = 10
    mean: ClassVar[tuple[float, ...]] = (0.4377, 0.4438, 0.4728)
    std: ClassVar[tuple[float, ...]] = (0.1980, 0.2010, 0.1970)
    repo: str | None = setting("ufldl-stanford/svhn", REPO_HELP)
    subset: str | None = setting("cropped_digits", "subset to read, where the folder has several")

    def _image_format(self) -> ImageFormat:
        return ImageFormat("colour", shape=(32, 32))
