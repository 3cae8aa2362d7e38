"""What sources of texts, windows and tables share: rows with a label, and optionally a user, that become
samples once and are then cached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from holdfast.core.registry import setting
from holdfast.data.cache import New, cached
from holdfast.data.labels import read_labels, read_users
from holdfast.data.parquet import ParquetRows
from holdfast.data.row_order import RowOrder
from holdfast.data.samples import Samples
from holdfast.data.sources.base import USER_HELP, FolderSource, inputs

Scale = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation, for one channel or for each

# not part of the cache key: the files are
_ASIDE = (
    "normalise",
    "folder",
    "repo",
    "subset",
    "revision",
    "test_split",
)


class LabelledSource(FolderSource):
    """A subclass implements _fill: it makes x from the rows and returns its mean and deviation."""

    encoding: ClassVar[str] = ""  # changed where the same files become other samples than before
    classes: ClassVar[int | None] = None  # number of classes of a known dataset
    class_names: ClassVar[
        tuple[str, ...]
    ] = ()  # names of the classes of a known dataset whose files lack them
    label: str = setting(
        "label", "column of the labels: class numbers, or words, which are numbered in sorted order"
    )
    user: str | None = setting(None, USER_HELP)

    def load(self, dir: Path | None) -> Samples:
        files = self._files(dir)
        return self._read(inputs(files), lambda new: self._make(files, new))

    def _read(self, paths: list[Path], make: Callable[[New], dict[str, Any]]) -> Samples:
        """Return the samples that `make` makes of these files, from the cache if they are there."""
        matters = {name: value for name, value in self.settings().items() if name not in _ASIDE}
        named = "" if self.user is None else " with the names of users"  # 0.1 kept none of them
        entry = cached(f"{self.name}{self.encoding} {matters}{named}", paths, make)
        made: dict[str, Any] = {**entry.arrays, **entry.facts}
        return self._samples(**made)

    def _make(self, files: Mapping[str, ParquetRows], new: New) -> dict[str, Any]:
        order = self._order(files)
        # first: errors in labels are found quickly
        labels, classes, names = read_labels(order.parts, self.label, self.classes, self.class_names)
        order.arranged(labels, new("y", (order.count,), np.int64))
        who: tuple[str, ...] = ()
        if self.user is not None:
            users, who = read_users(order.parts, self.user)
            order.arranged(users, new("user", (order.count,), np.int64))
        mean, std = self._fill(order, new)
        return {
            "classes": classes,
            "class_names": names,
            "user_names": who,
            "train_rows": order.train_rows,
            "mean": mean,
            "std": std,
        }

    def _fill(self, order: RowOrder, new: New) -> Scale:
        raise TypeError(f"source '{self.name}' does not implement _fill")
