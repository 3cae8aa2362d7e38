"""Take apart what is handed over for a client: samples, labels, and its own test set where it has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import DataError
from holdfast.data.handed.tables import read_frame, read_hub_dataset
from holdfast.data.handed.values import Columns, read_torch_dataset, values_of

_SHAPES = "(X, y), (X, y, X_test, y_test), a torch Dataset, a Hugging Face Dataset or a pandas frame"


@dataclass(frozen=True)
class Piece:
    """Samples and labels from one place, such as "client 3" or "the test set of client 'Berlin'"."""

    where: str
    x: Any  # a NumPy array, a list of texts, or Columns
    y: Any  # a NumPy array of numbers or words
    class_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Reading:
    """Which columns of a dataset or frame to read."""

    label: str | None = None
    columns: tuple[str, ...] = ()


def is_entry(given: Any) -> bool:
    """Whether this is what a client can be given, rather than a setting."""
    if is_dataset(given):
        return True
    return isinstance(given, (tuple, list)) and len(given) in (2, 4) and any(map(_holds_data, given))


def is_dataset(given: Any) -> bool:
    """Whether this has samples and labels in one object."""
    return is_frame(given) or is_hub(given) or is_splits(given) or _is_torch_dataset(given)


def read_entry(given: Any, test: Any, where: str, how: Reading) -> tuple[Piece, Piece | None]:
    """The samples of a client for training and, if it has them, for testing. `test` is a test set that was
    given apart."""
    train, own = _parted(given, where)
    if own is not None and test is not None:
        raise DataError(
            f"data: {where} has two test sets, one beside its samples and one in test=; leave one out"
        )
    own = test if own is None else own
    named = f"the test set of {where}" if where else "the test set"
    return (
        _piece(train, where, how),
        None if own is None else _piece(own, named, how),
    )


def _parted(given: Any, where: str) -> tuple[Any, Any]:
    """(train, test or None), each a pair (X, y) or an object that has both."""
    if is_splits(given):
        if "train" not in given:
            raise DataError(f"data: {where} has splits {', '.join(given)}, but none is called train")
        return given["train"], given.get("test", given.get("validation"))
    if is_dataset(given):
        return given, None
    if isinstance(given, (tuple, list)) and len(given) == 4:
        return (given[0], given[1]), (given[2], given[3])
    if isinstance(given, (tuple, list)) and len(given) == 2:
        first, second = given
        if is_dataset(first) and is_dataset(second) and not _is_labels(first, second):
            return first, second
        return (first, second), None
    kind = (
        f"{type(given).__name__} of {len(given)}"
        if isinstance(given, (tuple, list))
        else type(given).__name__
    )
    raise DataError(f"data: {where} is a {kind}; give {_SHAPES}")


def _piece(given: Any, where: str, how: Reading) -> Piece:
    if is_frame(given):
        x, y, names = read_frame(given, where, how.label, how.columns)
    elif is_hub(given):
        x, y, names = read_hub_dataset(given, where, how.label, how.columns)
    elif _is_torch_dataset(given):
        x, y, names = (*read_torch_dataset(given, where), ())
    elif isinstance(given, (tuple, list)) and len(given) == 2:
        x, y, names = _frame_or_array(given[0], where, how), values_of(given[1], where, "labels"), ()
    else:
        raise DataError(f"data: {where} is a {type(given).__name__}; give {_SHAPES}")
    if len(x) != len(y):
        raise DataError(f"data: {where} has {len(x):,} samples, but {len(y):,} labels")
    if not len(y):
        raise DataError(f"data: {where} has no samples; leave it out")
    return Piece(where, x, y, names)


def _frame_or_array(x: Any, where: str, how: Reading) -> Any:
    if is_frame(x):
        return Columns.of(x, how.columns or tuple(map(str, x.columns)), where)
    return values_of(x, where, "samples")


def is_frame(given: Any) -> bool:
    return _home(given) == "pandas" and type(given).__name__ == "DataFrame"


def is_hub(given: Any) -> bool:
    return _home(given) == "datasets" and hasattr(given, "features") and hasattr(given, "__len__")


def is_splits(given: Any) -> bool:
    """A DatasetDict: splits of a Hugging Face dataset by name."""
    return _home(given) == "datasets" and isinstance(given, Mapping)


def _is_torch_dataset(given: Any) -> bool:
    from torch.utils.data import Dataset

    return isinstance(given, Dataset)


def _is_labels(first: Any, second: Any) -> bool:
    """Whether the second of two frames is a column of labels for the first."""
    return is_frame(first) and is_frame(second) and second.shape[1] == 1 and first.shape[1] != 1


def _holds_data(value: Any) -> bool:
    """Whether a value is made of samples or labels, not a name or a number."""
    if is_dataset(value) or hasattr(value, "__array__"):
        return True
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) > 0


def _home(given: Any) -> str:
    """The library that an object comes from, which need not be imported for that."""
    return type(given).__module__.partition(".")[0]
