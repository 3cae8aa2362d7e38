"""Images from Parquet files: what the known datasets share, and `images` for a folder of your own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from holdfast.core.registry import register, setting
from holdfast.data.cache import New, cached
from holdfast.data.decode_image import ImageFormat, Mode
from holdfast.data.images import COLUMNS, decode_images
from holdfast.data.labels import read_labels, read_users
from holdfast.data.moments import Moments
from holdfast.data.parquet import ParquetRows
from holdfast.data.samples import Samples
from holdfast.data.sources.base import USER_HELP, FolderSource, inputs


class ImageSource(FolderSource):
    """Decodes images once, into the cache. A known dataset declares what its files hold; otherwise it is read
    from the files."""

    classes: ClassVar[int | None] = None
    names: ClassVar[tuple[str, ...]] = ()  # names of the classes, where the files may lack them
    # mean and std are those of the whole train split, whatever part of it is available
    published: ClassVar[bool] = True

    def _columns(self) -> tuple[tuple[str, ...], str, str | None]:
        """Return the columns: image (or the names it may have), label, user."""
        return COLUMNS, "label", None

    def _classes(self) -> int | None:
        return self.classes

    def _image_format(self) -> ImageFormat:
        raise TypeError(f"source '{self.name}' does not implement _image_format")

    def load(self, dir: Path | None) -> Samples:
        files = self._files(dir)
        what = f"{self.name} {self._columns()} {self._image_format()} test={self.test}"
        entry = cached(what, inputs(files), lambda new: self._decode(files, new))
        facts = entry.facts
        return self._samples(
            entry.arrays["x"],
            entry.arrays["y"],
            facts["classes"],
            facts["train_rows"],
            facts.get("mean"),
            facts.get("std"),
            entry.arrays.get("user"),
            facts["class_names"],
        )

    def _decode(self, files: Mapping[str, ParquetRows], new: New) -> dict[str, Any]:
        order = self._order(files)
        image, label, user = self._columns()
        column = order.parts[0].need(image)
        # first: errors in labels are found quickly
        labels, classes, names = read_labels(order.parts, label, self._classes(), self.names)
        order.arranged(labels, new("y", (order.count,), np.int64))
        who: tuple[str, ...] = ()
        if user is not None:
            users, who = read_users(order.parts, user)
            order.arranged(users, new("user", (order.count,), np.int64))
        moments = None if self.published else Moments()
        decode_images(order, column, self._image_format(), new, self.name, moments)
        facts = {
            "classes": classes,
            "class_names": names,
            "user_names": who,
            "train_rows": order.train_rows,
        }
        return facts if moments is None else {**facts, "mean": moments.mean, "std": moments.std}


@register("source", "images")
class Images(ImageSource):
    """Images of your own: Parquet files with a column of encoded images and one of labels.

    Labels are class numbers, or words, which are numbered in sorted order. Licence: that of your data.
    """

    published: ClassVar[bool] = False
    image: str | None = setting(None, "column of the images; else image or img")
    label: str = setting("label", "column of the labels")
    user: str | None = setting(None, USER_HELP)
    mode: Mode = setting("auto", "grey or colour; auto: grey if the images are")
    size: int | None = setting(
        None, "images are resized to a square of this side; none: all must have the same size", ge=1
    )

    def _columns(self) -> tuple[tuple[str, ...], str, str | None]:
        return (self.image,) if self.image else COLUMNS, self.label, self.user

    def _image_format(self) -> ImageFormat:
        return ImageFormat(self.mode, self.size)
