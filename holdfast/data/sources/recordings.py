"""Sensor rows as they were recorded, cut into windows: `recordings`, for a folder of your own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import model_validator

from holdfast.core.errors import DataError
from holdfast.core.progress import progress
from holdfast.core.registry import register, setting
from holdfast.data.cache import New
from holdfast.data.labels import read_labels, read_users
from holdfast.data.moments import Moments
from holdfast.data.parquet import ParquetRows
from holdfast.data.row_order import set_aside
from holdfast.data.sources.labelled import LabelledSource
from holdfast.data.windows import cut_windows, place_windows, recordings

READ = 65536  # rows read at once
NUMBERS = 1 << 21  # numbers copied at once
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, eq=False)
class SensorRows:
    """The rows of one split, in file order. The values may be larger than memory: they come in pieces and can
    be read once."""

    label: np.ndarray  # [rows] whole numbers
    user: np.ndarray | None  # [rows] whole numbers
    time: np.ndarray | None  # [rows] float64, seconds
    values: Iterable[np.ndarray]  # [some rows, channels] float32, end to end

    def only(self, kept: np.ndarray) -> SensorRows:
        user, time = (None if one is None else one[kept] for one in (self.user, self.time))
        return SensorRows(self.label[kept], user, time, _only(self.values, kept))


@dataclass(frozen=True, eq=False)
class SplitWindows:
    """The windows of one split: what is kept of its rows once the values are read."""

    first: np.ndarray  # row
    last: np.ndarray
    label: np.ndarray
    user: np.ndarray | None
    values: Iterable[np.ndarray]


@register("source", "recordings")
class Recordings(LabelledSource):
    """Sensor rows of your own, cut into windows: Parquet files with one column per channel, rows in the order
    of their recording.

    A window lies within one recording: rows of one user and one label, without a jump in time. A sample is
    [channels, length], normalised channel by channel. If windows overlap, a client's test samples share rows
    with its training samples and accuracies are too high; leave overlap at 0 for comparisons. Licence: that
    of your data.
    """

    columns: tuple[str, ...] = setting(("x", "y", "z"), "columns of the channels", min_length=1)
    time: str | None = setting(None, "column of the times; none: only a new user or label ends a recording")
    unit: Literal["ns", "us", "ms", "s"] = setting("ns", "unit of the times")
    gap: float = setting(1.0, "a recording ends after this many seconds without a row", gt=0)
    length: int = setting(200, "number of rows of a window", ge=1)
    overlap: float = setting(0.0, "share of its rows that a window shares with the next one", ge=0, lt=1)
    minimum: int | None = setting(
        None,
        "smallest number of rows for which the rest of a recording becomes a window, filled with its"
        " last row; none: length",
        ge=1,
    )

    @model_validator(mode="after")
    def _sound(self) -> Recordings:
        if self.minimum is not None and self.minimum > self.length:
            raise ValueError(
                f"minimum is {self.minimum} but a window has length {self.length}; lower minimum"
            )
        return self

    def _make(self, files: Mapping[str, ParquetRows], new: New) -> dict[str, Any]:
        parts = tuple(files.values())
        labels, classes, names = read_labels(parts, self.label, self.classes, self.class_names)
        labels = _small(labels)
        users, who = (None, ()) if self.user is None else read_users(parts, self.user)
        users = None if users is None else _small(users)
        return {
            "classes": classes,
            "class_names": names,
            "user_names": who,
            **self._windows(self._sensor_rows(parts, labels, users), new),
        }

    def _sensor_rows(
        self, parts: Sequence[ParquetRows], labels: np.ndarray, users: np.ndarray | None
    ) -> Iterator[SensorRows]:
        begin = 0
        for rows in parts:
            span = slice(begin, begin + rows.count)
            time = None if self.time is None else _seconds(rows, self.time, self.unit)
            yield SensorRows(
                labels[span], None if users is None else users[span], time, _values(rows, self.columns)
            )
            begin = span.stop

    def _windows(self, tracks: Iterable[SensorRows], new: New) -> dict[str, Any]:
        """Cut the train split, and the test split where there is one."""
        cuts = [self._cut(track) for track in tracks]
        counts = [len(cut.first) for cut in cuts]
        count = sum(counts)
        if not counts[0]:
            least = self.minimum or self.length
            raise DataError(
                f"data '{self.name}': no recording has {least} rows; lower data.options.length or minimum"
            )
        place, train_rows = (np.arange(count), counts[0]) if len(cuts) > 1 else set_aside(count, self.test)
        new("y", (count,), np.int64)[place] = np.concatenate([cut.label for cut in cuts])
        users = [cut.user for cut in cuts if cut.user is not None]
        if users:
            # only users that have a window
            new("user", (count,), np.int64)[place] = np.unique(np.concatenate(users), return_inverse=True)[1]
        x, moments, begin = None, Moments(), 0
        with progress(f"cutting {self.name}", count) as advance:
            for cut in cuts:
                for windows in cut_windows(cut.values, cut.first, cut.last, self.length, NUMBERS):
                    if x is None:
                        x = new("x", (count, *windows.shape[1:]), np.float32)
                    rows = place[begin : begin + len(windows)]
                    x[rows] = windows
                    moments.add(windows[rows < train_rows])
                    begin += len(windows)
                    advance(len(windows))
        return {"train_rows": train_rows, "mean": moments.mean, "std": moments.std}

    def _cut(self, track: SensorRows) -> SplitWindows:
        ids = [track.label] if track.user is None else [track.label, track.user]
        first, last = place_windows(
            recordings(ids, track.time, self.gap), self.length, self.overlap, self.minimum
        )
        return SplitWindows(
            first, last, track.label[first], None if track.user is None else track.user[first], track.values
        )


def _small(ids: np.ndarray) -> np.ndarray:
    """Store ids in as few bytes as they need: there is one for every row."""
    return ids if ids.min() < 0 else ids.astype(np.min_scalar_type(int(ids.max())))


def _only(pieces: Iterable[np.ndarray], kept: np.ndarray) -> Iterator[np.ndarray]:
    begin = 0
    for piece in pieces:
        yield piece[kept[begin : begin + len(piece)]]
        begin += len(piece)


def _seconds(rows: ParquetRows, column: str, unit: str) -> np.ndarray:
    import pyarrow as pa

    kind = rows.type_of(column)
    stamps = pa.types.is_timestamp(kind)
    if not (stamps or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise DataError(f"{rows.paths[0]}: column '{column}' holds {kind}, not times; set data.options.time")
    out, begin = np.empty(rows.count), 0
    for batch in rows.batches([column], READ):
        values = batch.column(0).cast(pa.int64()) if stamps else batch.column(0)
        # NaN where missing, which ends a recording
        out[begin : begin + len(batch)] = values.to_numpy(zero_copy_only=False)
        begin += len(batch)
    out *= _UNITS[kind.unit if stamps else unit]
    return out


def _values(rows: ParquetRows, columns: Sequence[str]) -> Iterator[np.ndarray]:
    import pyarrow as pa

    for column in columns:
        kind = rows.type_of(column)
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise DataError(
                f"{rows.paths[0]}: column '{column}' holds {kind}, not numbers; set data.options.columns"
            )
    return _pieces(rows, columns)


def _pieces(rows: ParquetRows, columns: Sequence[str]) -> Iterator[np.ndarray]:
    begin = 0
    for batch in rows.batches(list(columns), max(1, min(READ, NUMBERS // len(columns)))):
        out = np.empty((len(batch), len(columns)), dtype=np.float32)
        for channel, column in enumerate(columns):
            with np.errstate(over="ignore"):  # values that become infinite are reported below
                out[:, channel] = batch.column(column).to_numpy(zero_copy_only=False)
            if not np.isfinite(out[:, channel]).all():
                row = begin + int((~np.isfinite(out[:, channel])).argmax())
                raise DataError(
                    f"{rows.place(row)} has a missing or infinite number in '{column}'; remove such rows"
                )
        yield out
        begin += len(batch)
