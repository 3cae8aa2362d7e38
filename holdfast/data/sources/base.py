"""What all sources share: normalisation, finding a folder, and the choice of test rows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from holdfast.core.registry import Part, setting
from holdfast.data.hub import Repository
from holdfast.data.layout import choose_test
from holdfast.data.lookup import Files, find_files
from holdfast.data.parquet import ParquetRows
from holdfast.data.row_order import RowOrder, set_aside
from holdfast.data.samples import Samples

REPO_HELP = "dataset id on the Hugging Face Hub, OWNER/NAME"
USER_HELP = "column of the user that a row comes from, for partitions by user"


class Source(Part):
    """The settings that every source has."""

    mean: ClassVar[tuple[float, ...]] = (0.5,)
    std: ClassVar[tuple[float, ...]] = (0.5,)
    normalise: Literal["dataset", "half", "none"] = setting(
        "dataset",
        "dataset: mean and deviation of the train split; half: mean and deviation 0.5, as PFLlib,"
        " FedCAP and FedAS do; none: 0..1",
    )

    def load(self, dir: Path | None) -> Samples:
        raise TypeError(f"source '{self.name}' does not implement load")

    def _samples(
        self,
        x: np.ndarray,
        y: np.ndarray,
        classes: int,
        train_rows: int,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        user: np.ndarray | None = None,
        class_names: Sequence[str] = (),
        user_names: Sequence[str] = (),
    ) -> Samples:
        """Build Samples. Mean and deviation of the train split are the class's own, or passed where they are
        only known from the files."""
        own = (tuple(mean or self.mean), tuple(std or self.std))
        shift, scale = {"dataset": own, "half": ((0.5,), (0.5,)), "none": ((0.0,), (1.0,))}[self.normalise]
        users = None if user is None else tensor_of(user)
        return Samples(
            tensor_of(x),
            tensor_of(y),
            classes,
            train_rows,
            shift,
            scale,
            self.name,
            users,
            tuple(class_names),
            tuple(user_names),
        )


class FolderSource(Source):
    """The settings of every source that is read from Parquet files."""

    also: ClassVar[tuple[str, ...]] = ()  # other names that the dataset's folder may have
    folder: str | None = setting(
        None, "folder name in the data directories, or a path; default: the dataset's name, with - or _"
    )
    repo: str | None = setting(None, REPO_HELP)
    subset: str | None = setting(None, "subset to read, where the folder has several")
    revision: str | None = setting(None, "branch, tag or commit on the Hub; default: the main branch")
    test: float = setting(
        0.2, "share of rows set aside for testing where the folder has no test split", ge=0, lt=1
    )

    test_split: str | None = setting(
        None, "split to test on; default: test, or else validation; none: a share of train"
    )

    def _files(self, dir: Path | None) -> dict[str, ParquetRows]:
        """Return the splits by name: train, and test where the dataset has one."""
        found = self._find(dir)
        test = choose_test(found, self.test_split, f"data '{self.name}'")
        return {"train": ParquetRows(found["train"]), **({"test": ParquetRows(found[test])} if test else {})}

    def _find(self, dir: Path | None, instead: str | None = None) -> Files:
        """Return all splits that exist; or the file that replaces the Parquet files."""
        return find_files(
            self._folders(), dir, Repository(self.repo, self.subset, self.revision, self.test_split), instead
        )

    def _folders(self) -> list[str]:
        """Return the names that the folder may have, the usual one first. A repository other than the default
        is another dataset."""
        if self.folder:
            return [self.folder]
        in_repo = [self.repo.rpartition("/")[2]] if self.repo else []
        usual = self.repo == type(self).model_fields["repo"].default
        return [self.name, *self.also, *in_repo] if usual else in_repo or [self.name]

    def _order(self, files: Mapping[str, ParquetRows]) -> RowOrder:
        """Return the place of each row, in the order in which `parts` are read."""
        parts = tuple(files.values())
        if len(parts) > 1:
            count = sum(rows.count for rows in parts)
            return RowOrder(parts, np.arange(count), parts[0].count)
        return RowOrder(parts, *set_aside(parts[0].count, self.test))


def inputs(files: Mapping[str, ParquetRows]) -> list[Path]:
    """Return all files that a cache entry depends on."""
    return [path for rows in files.values() for path in rows.paths]


def tensor_of(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():  # arrays of the cache are read-only, and nothing writes to samples
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
