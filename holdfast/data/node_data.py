"""Load the data that one client of a federation brings, from a folder of Parquet files or from a user's
function, and check it against what was declared.

A folder with a train and a test split keeps them; otherwise, and for a function's samples, data.split divides
the rows. The position of a row decides, so the same rows in the same order are divided the same way after
every restart.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.core.errors import DataError, HoldfastError
from holdfast.core.keys import Key
from holdfast.data.cache import New, cached
from holdfast.data.columns import kind_of, numbers
from holdfast.data.decode_image import ImageFormat
from holdfast.data.federation import Federation
from holdfast.data.hashed_words import WordHasher
from holdfast.data.images import COLUMNS, decode_images
from holdfast.data.labels import read_labels
from holdfast.data.layout import EXPECTED, choose_test, find_splits
from holdfast.data.list_columns import first_shape, read_lists
from holdfast.data.parquet import ParquetRows
from holdfast.data.row_order import RowOrder
from holdfast.data.samples import Samples
from holdfast.data.sources.base import tensor_of
from holdfast.data.sources.declared import Declared
from holdfast.data.sources.text import read_texts
from holdfast.data.split import Split, split_clients

_AT_ONCE = 1 << 22  # numbers read at once


def holding(
    federation: Federation, own: Samples, client: int, split: Split, declared: Declared, key: Key
) -> Federation:
    """Return the federation as one client sees it: it holds all of its own samples, and the others hold none.
    `key` is that of the data."""
    mine, test = np.arange(own.train_rows), np.arange(own.train_rows, len(own))

    def alone(rows: np.ndarray) -> list[np.ndarray]:
        return [rows if other == client else rows[:0] for other in range(federation.clients)]

    y = own.y.numpy()
    tables = split_clients(alone(mine), y, split, key.fold("split"), alone(test) if len(test) else None)
    count = int(tables[0].counts[client])
    if not declared.least <= count <= declared.most:
        raise DataError(
            f"client {client} has {count} training samples, but {declared.least} to {declared.most} are"
            " declared"
        )
    for name, table in (("validation", tables[1]), ("test", tables[2])):
        if int(table.counts[client]) > declared.most:
            raise DataError(
                f"client {client} has {int(table.counts[client])} {name} samples, but at most"
                f" {declared.most} are declared"
            )
    return replace(federation, samples=own, train=tables[0], validation=tables[1], test=tables[2])


def from_function(name: str, declared: Declared) -> Samples:
    """Load samples with a function, given as `file.py:load`: load() returns (x, y), as arrays or tensors, or
    Samples."""
    file, _, function = name.rpartition(":")
    load = _function(Path(file), function, name)
    try:
        found = load()
    except HoldfastError:
        raise
    except Exception as error:
        raise DataError(f"function {name} failed: {type(error).__name__}: {error}") from error
    return declared.accept(found if isinstance(found, Samples) else _samples(found, declared, name), name)


def from_folder(folder: Path, declared: Declared) -> Samples:
    """Load all rows of a folder, test rows last."""
    splits = find_splits(folder) if folder.is_dir() else {}
    if "train" not in splits:
        there = (
            "it has no train split"
            if splits
            else "it has no Parquet files"
            if folder.is_dir()
            else "there is no such folder"
        )
        raise DataError(f"data {folder}: {there}; expected {EXPECTED}")
    test = choose_test(splits, None, f"data {folder}")
    parts = tuple(ParquetRows(splits[name]) for name in ("train", *([test] if test else [])))
    matters = {
        name: value
        for name, value in declared.settings().items()
        if name not in ("mean", "std", "least", "most")
    }
    entry = cached(
        f"own {matters}",
        [path for rows in parts for path in rows.paths],
        lambda new: _make(parts, declared, new),
    )
    x, y = (tensor_of(entry.arrays[name]) for name in ("x", "y"))
    found = Samples(x, y, declared.classes, entry.facts["train_rows"], name=str(folder))
    return declared.accept(found, f"data {folder}")


def _make(parts: tuple[ParquetRows, ...], declared: Declared, new: New) -> dict[str, Any]:
    """Make the samples from the rows and the declaration alone: nothing is fitted to the data of one
    client."""
    order = RowOrder(parts, np.arange(sum(rows.count for rows in parts)), parts[0].count)
    labels = _labels(parts, declared)  # first: errors in labels are found quickly
    order.arranged(labels, new("y", (order.count,), np.int64))
    if declared.samples == "bytes":
        mode, size = "grey" if declared.shape[0] == 1 else "colour", (declared.shape[1], declared.shape[2])
        column = parts[0].need(declared.column or COLUMNS)
        decode_images(order, column, ImageFormat(mode, shape=size), new, "this client's images")  # type: ignore[arg-type]
        return {"train_rows": order.train_rows}
    words = declared.samples == "words"
    x, at = new("x", (order.count, *declared.shape), np.int32 if words else np.float32), 0
    for rows in parts:
        for batch in (_words if words else _table if declared.columns else _lists)(rows, declared):
            x[at : at + len(batch)] = batch.reshape(-1, *declared.shape)
            at += len(batch)
    return {"train_rows": order.train_rows}


def _labels(parts: tuple[ParquetRows, ...], declared: Declared) -> np.ndarray:
    for rows in parts:
        rows.need(declared.label)
        named = rows.class_names(declared.label)
        if named and declared.class_names and named != declared.class_names:
            raise DataError(
                f"{rows.paths[0]}: class names or their order differ in column '{declared.label}': found"
                f" {_few(named)}; declared {_few(declared.class_names)}"
            )
    if not declared.class_names and str(parts[0].type_of(declared.label)) in (
        "string",
        "large_string",
        "bool",
    ):
        raise DataError(
            f"{parts[0].paths[0]}: labels are words; list them in the order of their numbers in"
            " data.options.class_names"
        )
    return read_labels(parts, declared.label, declared.classes, declared.class_names)[0]


def _lists(rows: ParquetRows, declared: Declared) -> Any:
    column, at = rows.need(declared.column or "x"), 0
    shape, width = first_shape(rows, column), math.prod(declared.shape)
    if math.prod(shape) != width or len(shape) > 1 and shape != declared.shape:
        raise DataError(
            f"{rows.place(0)} has shape {list(shape)} in '{column}', but {list(declared.shape)} is declared"
        )
    for batch in rows.batches([column], max(1, min(1024, _AT_ONCE // width))):
        flat = read_lists(batch.column(0), shape, column, rows, at)
        at += len(flat)
        yield flat


def _table(rows: ParquetRows, declared: Declared) -> Any:
    at = 0
    for name in declared.columns:
        if kind_of(rows.type_of(name)) != "number":
            raise DataError(
                f"{rows.paths[0]}: column '{name}' holds {rows.type_of(name)}, not numbers; encode it,"
                " in the same way on all clients"
            )
    for batch in rows.batches(declared.columns, 4096):
        begin = at

        def place(row: int, begin: int = begin) -> str:
            return rows.place(begin + row)

        flat = np.stack([numbers(batch.column(name), name, place) for name in declared.columns], axis=1)
        if not np.isfinite(flat.astype(np.float32)).all():
            row = int((~np.isfinite(flat.astype(np.float32))).any(1).argmax())
            raise DataError(f"{place(row)} has a missing or infinite number; remove such rows")
        at += len(flat)
        yield flat.astype(np.float32)


def _words(rows: ParquetRows, declared: Declared) -> Any:
    column, words, at = rows.need(declared.column or "text"), WordHasher(declared.shape[0]), 0
    for batch in rows.batches([column]):
        texts = read_texts(batch.column(0), rows, at, column)
        at += len(texts)
        yield words.rows(texts)


def _function(file: Path, function: str, name: str) -> Callable[[], Any]:
    if not file.is_file() or not function.isidentifier():
        raise DataError(f"function {name}: expected FILE.py:NAME, a file that exists and a function in it")
    spec = importlib.util.spec_from_file_location(f"holdfast_own_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise DataError(f"function {name}: {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise DataError(
            f"function {name}: {file.name} failed to load: {type(error).__name__}: {error}"
        ) from error
    load = getattr(module, function, None)
    if not callable(load):
        raise DataError(f"function {name}: {file.name} has no function '{function}'")
    return load


def _samples(found: Any, declared: Declared, name: str) -> Samples:
    """Turn (x, y) into Samples; floats of any width become float32, whole labels of any width int64."""
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise DataError(f"function {name}: returned a {type(found).__name__}, expected (x, y) or Samples")
    try:
        x, y = (
            torch.as_tensor(np.asarray(part) if not isinstance(part, torch.Tensor) else part).cpu()
            for part in found
        )
    except (TypeError, ValueError) as error:
        raise DataError(f"function {name}: x and y must be arrays of numbers ({error})") from None
    if y.is_floating_point() or y.ndim != 1 or x.shape[:1] != y.shape:
        raise DataError(
            f"function {name}: x has shape {list(x.shape)} and y {list(y.shape)} of {y.dtype}; y must be"
            " one whole number per sample"
        )
    y, x = y.to(torch.int64), x.float() if x.is_floating_point() else x
    if x.dtype not in (torch.uint8, torch.float32, torch.int32):
        raise DataError(
            f"function {name}: x is {x.dtype}, expected bytes (uint8), numbers (float32) or words (int32)"
        )
    # labels that are too large are reported with the other checks
    classes = max(declared.classes, int(y.max()) + 1 if len(y) else 0)
    if len(y) and int(y.min()) < 0:
        raise DataError(
            f"function {name}: labels are {int(y.min())}..{int(y.max())}, but 0..{declared.classes - 1}"
            " are declared"
        )
    return Samples(x, y, classes, len(x), name=name)


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
