"""Make one sample store of the samples of all clients: bytes stay bytes, numbers become float32, words
int32. All clients must have samples of one kind and shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.progress import progress
from holdfast.data.columns import Category, Number, RowPlace, kind_of, numbers
from holdfast.data.handed.content import Kind
from holdfast.data.handed.entries import Piece
from holdfast.data.handed.values import Columns
from holdfast.data.hashed_words import HASHES, WordHasher
from holdfast.data.moments import Moments

Asked = Literal["auto", "images", "numbers", "words"]
Layout = Literal["auto", "first", "last"]
_CHANNELS = (1, 3, 4)
_AT_ONCE = 1 << 18  # numbers that are looked at together, few enough for a cache
_BUCKETS = 64  # as the source `table` has it
_DTYPES = {"images": np.uint8, "words": np.int32}


@dataclass(frozen=True)
class Encoding:
    """How samples are to be understood."""

    kind: Asked = "auto"
    layout: Layout = "auto"
    length: int = 128  # words of a text


Encoded = tuple[np.ndarray, Kind, tuple[float, ...], tuple[float, ...]]
"""Samples of all pieces, their kind, mean and deviation."""


def encode(pieces: Sequence[Piece], train: int, how: Encoding) -> Encoded:
    """Encode all pieces; the first `train` of them are for training, and decide mean and deviation."""
    first = pieces[0]
    for piece in pieces:
        if type(piece.x) is not type(first.x):
            raise DataError(
                f"data: {piece.where} has {_form(piece.x)}, but {first.where} has {_form(first.x)}; give"
                f" all clients"
                " the same"
            )
    if isinstance(first.x, Columns):
        return _table(pieces, train, how)
    if isinstance(first.x, list):
        return _texts(pieces, how), "words", (0.0,), (1.0,)
    kind = _kind_of(pieces, how.kind)
    x = _arrays(pieces, kind, how)
    if kind == "words":
        return x, kind, (0.0,), (1.0,)
    return x, kind, *_moments(x, sum(len(piece) for piece in pieces[:train]))


def _kind_of(pieces: Sequence[Piece], asked: Asked) -> Kind:
    """What the samples are: bytes are images, whole numbers in rows are words, the rest are numbers."""
    kinds = [_own_kind(piece) for piece in pieces]
    if asked == "images":  # bytes, in whatever type they are stored
        kinds = ["images" if kind == "whole numbers" else kind for kind in kinds]
    for piece, kind in zip(pieces, kinds, strict=True):
        if kind != kinds[0]:
            raise DataError(
                f"data: {piece.where} has samples of {piece.x.dtype}, but those of {pieces[0].where} are"
                f" {pieces[0].x.dtype}; give all clients the same type"
            )
    if asked != "auto":
        return asked
    if kinds[0] != "whole numbers":
        return kinds[0]
    if pieces[0].x.ndim == 2:
        return "words"
    low, high = min(int(p.x.min()) for p in pieces), max(int(p.x.max()) for p in pieces)
    return "images" if low >= 0 and high <= 255 else "numbers"


def _own_kind(piece: Piece) -> str:
    dtype = piece.x.dtype
    if dtype == np.uint8:
        return "images"
    if dtype.kind in "fb":
        return "numbers"
    if dtype.kind in "iu":
        return "whole numbers"
    raise DataError(f"data: {piece.where} has samples of {dtype}; give numbers, bytes or texts")


def _arrays(pieces: Sequence[Piece], kind: Kind, how: Encoding) -> np.ndarray:
    """One array of all samples; where there is only one piece of the right type, without a copy."""
    shaped = [_shaped(piece, kind, how) for piece in pieces]
    for piece, x in zip(pieces, shaped, strict=True):
        if x.shape[1:] != shaped[0].shape[1:]:
            raise DataError(
                f"data: {piece.where} has samples of shape {_by(x)}, but those of {pieces[0].where} are"
                f" {_by(shaped[0])}"
            )
        if not x[:1].size:
            raise DataError(f"data: {piece.where} has samples of shape {_by(x)}, which hold no numbers")
        _check_range(piece, x, kind)
    dtype = _DTYPES.get(kind, np.float32)
    if kind == "images" and any(x.dtype.kind == "f" for x in shaped):
        dtype = np.float32
    if len(shaped) == 1:
        out = np.ascontiguousarray(shaped[0], dtype)
    else:
        out = np.empty((sum(map(len, shaped)), *shaped[0].shape[1:]), dtype)
    begin = 0
    for piece, x in zip(pieces, shaped, strict=True):
        part = out[begin : begin + len(x)]
        if len(shaped) > 1:
            with np.errstate(over="ignore"):  # what is too large for float32 is found below
                part[...] = x
        if dtype == np.float32:
            _check_finite(piece, part)
        begin += len(x)
    return out


def _shaped(piece: Piece, kind: Kind, how: Encoding) -> np.ndarray:
    """[n, ...] as networks read it: channels first, a grey image with its one channel."""
    x: np.ndarray = piece.x
    if x.ndim == 1:
        x = x[:, None]
    if kind == "words":
        if x.ndim != 2:
            raise DataError(
                f"data: {piece.where} has texts of shape {_by(x)}, expected a row of words for each"
            )
        return x
    images = kind == "images"
    if images and x.ndim == 3:
        x = x[:, None]
    if x.ndim == 4 and _channels_last(x.shape, how.layout):
        x = np.moveaxis(x, 3, 1)
    if how.kind == "images" and x.ndim != 4:
        raise DataError(
            f"data: {piece.where} has samples of shape {_by(x)}, expected images: height x width, with"
            f" channels"
            " first or last"
        )
    return x


def _channels_last(shape: tuple[int, ...], layout: Layout) -> bool:
    if layout != "auto":
        return layout == "last"
    return shape[3] in _CHANNELS and shape[1] not in _CHANNELS


def _check_range(piece: Piece, x: np.ndarray, kind: Kind) -> None:
    """Refuse whole numbers that the store cannot hold."""
    if kind == "words":
        if x.dtype.kind not in "iu":
            raise DataError(
                f"data: {piece.where} has texts of {x.dtype}; give the numbers of words, from 1 on"
            )
        low, high = int(x.min()), int(x.max())
        if low < 0 or high > HASHES:
            bad = low if low < 0 else high
            raise DataError(
                f"data: {piece.where} has {bad} as a word; words are whole numbers from 1 to {HASHES:,},"
                f" with 0 after"
                ' the end of a text; for a table of numbers write holdfast.Data(..., kind="numbers")'
            )
    if kind == "images" and x.dtype.kind in "iu" and x.dtype != np.uint8:
        low, high = int(x.min()), int(x.max())
        if low < 0 or high > 255:
            raise DataError(f"data: {piece.where} has pixels {low}..{high}, expected 0..255")


def _check_finite(piece: Piece, x: np.ndarray) -> None:
    step = max(1, _AT_ONCE // max(1, x[0].size))
    for begin in range(0, len(x), step):
        finite = np.isfinite(x[begin : begin + step])
        if not finite.all():
            row = begin + int((~finite.reshape(len(finite), -1).all(1)).argmax())
            value = piece.x[row].reshape(-1)
            with np.errstate(over="ignore"):
                bad = value[~np.isfinite(value.astype(np.float32))][0]
            raise DataError(
                f"data: sample {row} of {piece.where} has {bad}, which is not a finite number; correct or"
                f" remove it"
            )


def _moments(x: np.ndarray, train: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel, or of each column of a table, over the rows for training."""
    moments = Moments()
    step = max(1, _AT_ONCE // max(1, x[0].size))
    with progress("reading the samples", train) as advance:
        for begin in range(0, train, step):
            part = x[begin : min(begin + step, train)]
            moments.add(part)
            advance(len(part))
    return moments.mean, moments.std


def _texts(pieces: Sequence[Piece], how: Encoding) -> np.ndarray:
    hasher = WordHasher(how.length)
    out = np.zeros((sum(map(len, pieces)), how.length), np.int32)
    begin = 0
    with progress("hashing words", len(out)) as advance:
        for piece in pieces:
            for first in range(0, len(piece), 1024):
                texts = piece.x[first : first + 1024]
                strange = [row for row, text in enumerate(texts) if not isinstance(text, str)]
                if strange:
                    raise DataError(f"data: row {first + strange[0]} of {piece.where} has no text")
                out[begin + first : begin + first + len(texts)] = hasher.rows(texts)
                advance(len(texts))
            begin += len(piece)
    return out


def _table(pieces: Sequence[Piece], train: int, how: Encoding) -> Encoded:
    """Columns as the source `table` encodes them: numbers standardised, words as one column for each
    value."""
    if how.kind != "auto":
        raise DataError(f'data: kind is "{how.kind}", but the samples are columns of a table; leave kind out')
    first: Columns = pieces[0].x
    for piece in pieces:
        if set(piece.x.names) != set(first.names):
            odd = sorted(set(piece.x.names) ^ set(first.names))[0]
            has = "has" if odd in piece.x.names else "lacks"
            raise DataError(
                f"data: {piece.where} {has} the column '{odd}', unlike {pieces[0].where}; give all the"
                f" same columns"
            )
    blocks: list[np.ndarray] = []
    with progress("encoding columns", len(first.names)) as advance:
        for name in first.names:
            blocks.append(
                _column([(piece.where, piece.x.values.column(name)) for piece in pieces], name, train)
            )
            advance(1)
    x = np.concatenate(blocks, axis=1)
    if not x.shape[1]:
        raise DataError("data: no column besides the label has a value")
    return x, "table", (0.0,), (1.0,)


def _column(columns: list[tuple[str, Any]], name: str, train: int) -> np.ndarray:
    """One column of all pieces, encoded by what the pieces for training hold."""
    import pyarrow as pa

    kinds = [kind_of(values.type) for _, values in columns]
    for (where, values), kind in zip(columns, kinds, strict=True):
        if kind == "neither":
            raise DataError(f"data: {where} has {values.type} in column '{name}', neither numbers nor words")
        if kind != kinds[0]:
            raise DataError(
                f"data: {where} has {values.type} in column '{name}', but {columns[0][0]} has"
                f" {columns[0][1].type}"
            )
    if kinds[0] == "category":
        words = [values.cast(pa.large_string()) for _, values in columns]
        category = Category(pa.chunked_array([c for one in words[:train] for c in one.chunks]), _BUCKETS)
        return np.concatenate([category(one) for one in words])
    places = [_place(where) for where, _ in columns]
    arrays = [numbers(values, name, place) for (_, values), place in zip(columns, places, strict=True)]
    number = Number(name, np.concatenate(arrays[:train]))
    return np.concatenate([number(array, place) for array, place in zip(arrays, places, strict=True)])


def _place(where: str) -> RowPlace:
    return lambda row: f"data: row {row} of {where}"


def _form(x: Any) -> str:
    return {Columns: "columns of a table", list: "texts"}.get(type(x), "an array")


def _by(x: np.ndarray) -> str:
    return " x ".join(map(str, x.shape[1:])) or "one number"
