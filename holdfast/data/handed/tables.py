"""Read data frames and Hugging Face datasets: which column is the label, and what the others are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.progress import progress
from holdfast.data.handed.values import Columns, values_of

_LABELS = ("label", "labels", "target")
_INPUTS = ("image", "img", "text", "sentence", "x", "input_ids", "features", "signal")

Read = tuple[Any, np.ndarray, tuple[str, ...]]  # samples, labels, names of the classes


def read_frame(frame: Any, where: str, label: str | None, columns: Sequence[str]) -> Read:
    """A pandas frame: one column is the label, the others (or those named) are the sample."""
    names = list(map(str, frame.columns))
    target = _label_of(names, label, where)
    frame = frame.rename(columns=str)
    inputs = _inputs_of(names, target, columns, where)
    y = values_of(frame[target], where, "labels")
    if len(inputs) == 1 and _is_whole_sample(frame[inputs[0]]):
        return values_of(frame[inputs[0]].tolist(), where, "samples"), y, ()
    return Columns.of(frame, inputs, where), y, ()


def read_hub_dataset(dataset: Any, where: str, label: str | None, columns: Sequence[str]) -> Read:
    """A Hugging Face dataset: a column of images, texts or lists of numbers; or columns of a table."""
    names = list(dataset.column_names)
    target = _label_of(names, label, where)
    inputs = _inputs_of(names, target, columns, where)
    if not columns and len(inputs) > 1:  # ids and file names beside the sample are left out
        inputs = next(([name] for name in _INPUTS if name in inputs), inputs)
    classes = tuple(getattr(dataset.features[target], "names", None) or ())
    y = values_of(np.asarray(dataset.with_format("numpy")[target][:]), where, "labels")
    feature = dataset.features[inputs[0]]
    if len(inputs) > 1:
        return Columns.of(dataset.select_columns(inputs).to_pandas(), inputs, where), y, classes
    if type(feature).__name__ == "Image":
        return _images(dataset, inputs[0], where), y, classes
    if getattr(feature, "dtype", "") in ("string", "large_string"):
        return list(dataset[inputs[0]][:]), y, classes
    if type(feature).__name__ == "Value":
        return Columns.of(dataset.select_columns(inputs).to_pandas(), inputs, where), y, classes
    return values_of(_lists(dataset, inputs[0]), where, "samples"), y, classes


def _lists(dataset: Any, name: str) -> Any:
    """A column of lists as an array, or as lists where their lengths differ."""
    found = dataset.with_format("numpy")[name][:]
    array = np.asarray(found)
    return array if array.dtype.kind != "O" else [np.asarray(value) for value in found]


def _images(dataset: Any, name: str, where: str) -> np.ndarray:
    """Decoded images, [n, channels, height, width]: one channel if they are grey, else three."""
    store: np.ndarray | None = None
    with progress(f"decoding {where or name}", len(dataset)) as advance:
        for row, image in enumerate(dataset[name]):
            if image is None:
                raise DataError(f"data: row {row} of {where} has no image in '{name}'")
            if image.mode not in ("L", "RGB"):
                image = image.convert("L" if image.mode == "1" else "RGB")
            pixels = np.asarray(image, dtype=np.uint8)
            pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
            if store is None:
                store = np.empty((len(dataset), *pixels.shape), np.uint8)
            if pixels.shape != store.shape[1:]:
                raise DataError(
                    f"data: image {row} of {where} is {' x '.join(map(str, pixels.shape))}, the first"
                    f" {' x '.join(map(str, store.shape[1:]))}; give all images one size and colour mode"
                )
            store[row] = pixels
            advance(1)
    assert store is not None
    return store


def _label_of(names: Sequence[str], label: str | None, where: str) -> str:
    """The column of the labels: as it was named, or the usual one."""
    wanted = (label,) if label is not None else _LABELS
    found = next((name for name in wanted if name in names), None)
    if found is None:
        said = f"column '{label}'" if label is not None else "column 'label'"
        raise DataError(
            f"data: {where} has no {said}; name the column of the labels in holdfast.Data(...,"
            f" label=...), it has"
            f" {', '.join(names)}"
        )
    return found


def _inputs_of(names: Sequence[str], target: str, columns: Sequence[str], where: str) -> list[str]:
    for name in columns:
        if name == target:
            raise DataError(
                f"data: column '{name}' is the label and must not be an input; remove it from columns"
            )
        if name not in names:
            raise DataError(f"data: {where} has no column '{name}'; it has {', '.join(names)}")
    inputs = list(columns) or [name for name in names if name != target]
    if not inputs:
        raise DataError(f"data: {where} has no column besides '{target}'")
    return inputs


def _is_whole_sample(series: Any) -> bool:
    """Whether the only column holds a whole sample in each row: a text, or a list."""
    first = next((value for value in series if value is not None), None)
    return isinstance(first, (str, list, tuple, np.ndarray))
