"""Number the labels of all clients together: class numbers as they are; words and booleans in the order of
their sorted names."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from holdfast.core.errors import DataError, suggest
from holdfast.data.handed.entries import Piece

Numbered = tuple[list[np.ndarray], int, tuple[str, ...]]
"""Labels of each piece, the number of classes, and their names where they are known."""


def number_labels(pieces: Sequence[Piece], classes: int | Sequence[str] | None) -> Numbered:
    """`classes` is the number of classes or their names; otherwise they are found over all pieces."""
    labels = [_one_each(piece) for piece in pieces]
    wordy = [array.dtype.kind in "UTb" for array in labels]
    for piece, words in zip(pieces, wordy, strict=True):
        if words != wordy[0]:
            kinds = ("words", "numbers") if words else ("numbers", "words")
            raise DataError(
                f"data: {piece.where} has labels that are {kinds[0]}, but those of {pieces[0].where} are"
                f" {kinds[1]}"
            )
    names = _names(pieces, classes)
    if wordy[0]:
        return _words(pieces, labels, names, classes if isinstance(classes, int) else None)
    return _numbers(pieces, labels, names, classes if isinstance(classes, int) else len(names) or None)


def warn_of_unseen(
    train: Sequence[tuple[Piece, np.ndarray]], tests: Sequence[tuple[Piece, np.ndarray]], names: Sequence[str]
) -> None:
    """Warn of classes that clients are tested on and that no client trains on."""
    seen = np.unique(np.concatenate([labels for _, labels in train]))
    for piece, labels in tests:
        unseen = np.setdiff1d(labels, seen)
        if len(unseen):
            said = f"'{names[unseen[0]]}'" if names else str(unseen[0])
            warnings.warn(
                f"data: {piece.where} has class {said}, which no client trains on", UserWarning, stacklevel=2
            )


def _one_each(piece: Piece) -> np.ndarray:
    labels = np.asarray(piece.y)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise DataError(
            f"data: {piece.where} has labels of shape {tuple(labels.shape)}, expected one label for each"
            f" sample;"
            " for one-hot labels give y.argmax(1)"
        )
    if labels.dtype.kind not in "iufbUT":
        raise DataError(
            f"data: {piece.where} has labels of type {labels.dtype}; give whole numbers, words or booleans"
        )
    return labels


def _names(pieces: Sequence[Piece], classes: int | Sequence[str] | None) -> tuple[str, ...]:
    """Names of the classes: given, or from the datasets, where all must agree."""
    if classes is not None and not isinstance(classes, int):
        names = tuple(map(str, classes))
        if len(set(names)) < len(names):
            raise DataError("data: classes has the same name twice")
        return names
    named = [piece for piece in pieces if piece.class_names]
    for piece in named:
        if piece.class_names != named[0].class_names:
            raise DataError(
                f"data: {piece.where} names other classes, or in another order, than {named[0].where};"
                f" give all the"
                " same"
            )
    return named[0].class_names if named else ()


def _numbers(
    pieces: Sequence[Piece], labels: Sequence[np.ndarray], names: tuple[str, ...], classes: int | None
) -> Numbered:
    total = sum(map(len, labels))
    most = total if classes is None else classes
    out = []
    for piece, values in zip(pieces, labels, strict=True):
        whole = np.isfinite(values) & (values == np.floor(values)) if values.dtype.kind == "f" else True
        wrong = ~(whole & (values >= 0) & (values < most))
        if wrong.any():
            row = int(wrong.argmax())
            expected = (
                f"expected whole numbers 0..{classes - 1}"
                if classes is not None
                else f"expected whole numbers from 0 on, less than the number of samples, {total:,}"
            )
            raise DataError(f"data: {piece.where} has label {values[row]!s} in row {row}; {expected}")
        out.append(values.astype(np.int64, copy=False))
    found = classes if classes is not None else max(int(values.max()) for values in out) + 1
    return out, found, names


def _words(
    pieces: Sequence[Piece], labels: Sequence[np.ndarray], names: tuple[str, ...], classes: int | None
) -> Numbered:
    texts = [_texts(values) for values in labels]
    distinct = [np.unique(values, return_inverse=True) for values in texts]
    present: set[str] = set().union(*(found.tolist() for found, _ in distinct))
    known = names or tuple(sorted(present))
    if classes is not None and len(known) != classes:
        raise DataError(f"data: classes is {classes}, but there are {len(known)} different labels")
    place = {name: number for number, name in enumerate(known)}
    out = []
    for piece, (found, where) in zip(pieces, distinct, strict=True):
        strange = [word for word in found.tolist() if word not in place]
        if strange:
            raise DataError(
                f"data: {piece.where} has label '{strange[0]}', which is not one of the"
                f" classes{suggest(strange[0], known)}"
            )
        numbers = np.array([place[word] for word in found.tolist()], dtype=np.int64)
        out.append(numbers[where.reshape(-1)])
    return out, len(known), known


def _texts(values: np.ndarray) -> np.ndarray[Any, Any]:
    if values.dtype.kind == "b":
        return np.where(values, "true", "false")
    return values.astype(str)
