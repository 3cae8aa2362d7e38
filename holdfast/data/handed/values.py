"""Make NumPy arrays of what Python has: arrays, tensors, lists, torch datasets. Nothing is copied that has
the right form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.core.errors import DataError
from holdfast.core.progress import progress


@dataclass(frozen=True)
class Columns:
    """Columns of a table, in the same order for all clients."""

    names: tuple[str, ...]
    values: Any  # pyarrow.Table

    def __len__(self) -> int:
        return int(self.values.num_rows)

    @staticmethod
    def of(frame: Any, names: Sequence[str], where: str) -> Columns:
        """Columns of a pandas frame."""
        import pyarrow as pa

        frame = frame.rename(columns=str)
        missing = [name for name in names if name not in frame.columns]
        if missing:
            raise DataError(
                f"data: {where} has no column '{missing[0]}'; its columns are {', '.join(frame.columns)}"
            )
        try:
            return Columns(tuple(names), pa.Table.from_pandas(frame[list(names)], preserve_index=False))
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise DataError(f"data: {where} has a column that cannot be read: {_first_line(error)}") from None


def values_of(given: Any, where: str, what: str) -> Any:
    """An array of numbers or words, or a list of texts; `what` is samples or labels."""
    if isinstance(given, torch.Tensor):
        return _of_tensor(given)
    if type(given).__module__.partition(".")[0] == "pandas":
        return _of_pandas(given, where, what)
    if isinstance(given, np.ndarray):
        return _of_array(given, where, what)
    if hasattr(given, "__array__"):
        return _of_array(np.asarray(given), where, what)
    if isinstance(given, (list, tuple, range)):
        return _of_list(list(given), where, what)
    raise DataError(
        f"data: {where} has {what} of type {type(given).__name__}; give an array, a tensor or a list"
    )


def _of_tensor(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.numpy()


def _of_pandas(given: Any, where: str, what: str) -> np.ndarray:
    """A series, an index, or a frame of one column."""
    if getattr(given, "ndim", 1) == 2:
        if given.shape[1] != 1:
            raise DataError(f"data: {where} has {given.shape[1]} columns of {what}; give one")
        given = given.iloc[:, 0]
    if bool(given.isna().any()):
        row = int(np.asarray(given.isna()).argmax())
        raise DataError(f"data: {where} has no value in row {row} of its {what}; every sample needs one")
    return _of_array(given.to_numpy(), where, what)


def _of_array(array: np.ndarray, where: str, what: str) -> Any:
    if array.dtype.kind in "OUST" and what == "samples" and array.ndim == 1:
        return _of_list(array.tolist(), where, what)
    if array.dtype.kind == "O":
        return _of_objects(array, where, what)
    if array.dtype.kind == "S":
        return array.astype(str)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def _of_objects(array: np.ndarray, where: str, what: str) -> np.ndarray:
    """An array of Python objects as one of numbers, words or booleans, where all are of one kind."""
    kinds = {type(value) for value in array.reshape(-1).tolist()}
    if kinds <= {str, bool, np.str_, np.bool_} or kinds <= {int, float, np.int64, np.float64}:
        return np.asarray(array.tolist()).reshape(array.shape)
    names = " and ".join(sorted(kind.__name__ for kind in kinds))
    raise DataError(f"data: {where} has {what} of {names}; give numbers or words")


def _of_list(values: list[Any], where: str, what: str) -> Any:
    if values and all(isinstance(value, str) for value in values):
        return values if what == "samples" else np.asarray(values)
    if values and isinstance(values[0], torch.Tensor):
        values = [_of_tensor(value) for value in values]
    if values and what == "samples" and _are_token_lists(values):
        return _filled(values)
    try:
        array = np.asarray(values)
    except ValueError:
        raise DataError(
            f"data: {where} has {what} of different shapes; they must all have one shape"
        ) from None
    return _of_array(array, where, what) if array.dtype.kind != "O" else _of_objects(array, where, what)


def _are_token_lists(values: list[Any]) -> bool:
    """Whether these are texts as lists of token numbers, of different lengths."""
    if not all(isinstance(value, (list, tuple, np.ndarray)) for value in values):
        return False
    if len({len(value) for value in values}) == 1:
        return False
    return all(
        np.asarray(value).ndim == 1 and np.asarray(value).dtype.kind in "iu" for value in values if len(value)
    )


def _filled(texts: list[Any]) -> np.ndarray:
    """Texts side by side, with 0 after the end of the shorter ones."""
    out = np.zeros((len(texts), max(map(len, texts))), dtype=np.int64)
    for row, text in zip(out, texts, strict=True):
        row[: len(text)] = text
    return out


def read_torch_dataset(dataset: Any, where: str) -> tuple[Any, np.ndarray]:
    """All samples and labels of a map-style dataset, read through once."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"data: {where} is a {type(dataset).__name__} without a length; give a map-style Dataset, or"
            f" arrays"
        )
    if type(dataset) is torch.utils.data.TensorDataset and len(dataset.tensors) == 2:
        x, y = dataset.tensors
        return _of_tensor(x), _of_tensor(y)
    count = len(dataset)
    if not count:
        raise DataError(f"data: {where} has no samples; leave it out")
    labels: list[Any] = []
    store: np.ndarray | None = None
    texts: list[str] = []
    with progress(f"reading {where or type(dataset).__name__}", count) as advance:
        for row in range(count):
            sample, label = _item(dataset, row, where)
            labels.append(label)
            if isinstance(sample, str):
                texts.append(sample)
                advance(1)
                continue
            array = _of_tensor(sample) if isinstance(sample, torch.Tensor) else np.asarray(sample)
            if store is None:
                store = np.empty((count, *array.shape), array.dtype)
            if array.shape != store.shape[1:] or array.dtype != store.dtype:
                raise DataError(
                    f"data: sample {row} of {where} is {_about(array)}, but its first is {_about(store[0])}"
                )
            store[row] = array
            advance(1)
    return texts if store is None else store, values_of(labels, where, "labels")


def _item(dataset: Any, row: int, where: str) -> tuple[Any, Any]:
    item = dataset[row]
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        kind = (
            f"{type(item).__name__} of {len(item)}"
            if isinstance(item, (tuple, list))
            else type(item).__name__
        )
        raise DataError(f"data: item {row} of {where} is a {kind}, expected a pair (sample, label)")
    sample, label = item
    if isinstance(label, torch.Tensor):
        label = label.item() if label.numel() == 1 else label.tolist()
    return sample, label


def _about(array: np.ndarray) -> str:
    return f"{' x '.join(map(str, array.shape)) or 'one number'} of {array.dtype}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
