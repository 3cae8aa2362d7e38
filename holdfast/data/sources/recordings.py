"""Sensors' rows as they were recorded, cut into windows: `recordings`, for a folder of your own. Where a window may lie: data/cut.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import model_validator

from holdfast.core.errors import DataError
from holdfast.core.registry import register, setting
from holdfast.data.cache import New
from holdfast.data.cut import place_windows, recordings, take_windows
from holdfast.data.labels import read_labels, read_users
from holdfast.data.moments import Moments
from holdfast.data.order import set_aside
from holdfast.data.parquet import Rows
from holdfast.data.progress import progress
from holdfast.data.sources.labelled import Labelled

PIECE = 4096  # windows copied at once
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, eq=False)
class Track:
    """The rows of one split, in the order of the file."""

    label: np.ndarray  # [rows] int64
    user: np.ndarray | None  # [rows] int64
    time: np.ndarray | None  # [rows] float64, seconds
    values: np.ndarray  # [rows, channels] float32

    def only(self, kept: np.ndarray) -> Track:
        user, time = (None if one is None else one[kept] for one in (self.user, self.time))
        return Track(self.label[kept], user, time, self.values[kept])


@register("source", "recordings")
class Recordings(Labelled):
    """Sensor rows of your own, cut into windows: Parquet files with a column for each channel, rows in the order of their recording.

    A window lies within one recording: within rows of one user and one label, with no jump in time. A sample is [channels, length],
    normalised channel by channel. Where windows overlap, a client's test samples share rows with its training samples: accuracies of
    such runs flatter, so leave overlap at 0 to compare them. Licence: that of your data.
    """

    columns: tuple[str, ...] = setting(("x", "y", "z"), "columns of the channels", min_length=1)
    time: str | None = setting(None, "column of the times; else only a new user or label ends a recording")
    unit: Literal["ns", "us", "ms", "s"] = setting("ns", "what the times count")
    gap: float = setting(1.0, "seconds without a row that end a recording", gt=0)
    length: int = setting(200, "rows of a window", ge=1)
    overlap: float = setting(0.0, "share of its rows that a window has in common with the next one", ge=0, lt=1)
    minimum: int | None = setting(None, "rows that make the rest of a recording a window, filled with its last row; else length", ge=1)

    @model_validator(mode="after")
    def _sound(self) -> Recordings:
        if self.minimum is not None and self.minimum > self.length:
            raise ValueError(f"minimum is {self.minimum} but a window has length {self.length}; lower minimum")
        return self

    def _make(self, files: Mapping[str, Rows], new: New) -> dict[str, Any]:
        parts = tuple(files.values())
        labels, classes, names = read_labels(parts, self.label, self.classes, self.class_names)
        users = None if self.user is None else read_users(parts, self.user)
        tracks, begin = [], 0
        for rows in parts:
            span = slice(begin, begin + rows.count)
            time = None if self.time is None else _seconds(rows, self.time, self.unit)
            tracks.append(Track(labels[span], None if users is None else users[span], time, _values(rows, self.columns)))
            begin = span.stop
        return {"classes": classes, "class_names": names, **self._windows(tracks, new)}

    def _windows(self, tracks: Sequence[Track], new: New) -> dict[str, Any]:
        """Cut train, and test where there is one."""
        spans = [self._spans(track) for track in tracks]
        counts = [len(first) for first, _ in spans]
        count = sum(counts)
        if not counts[0]:
            least = self.minimum or self.length
            raise DataError(f"data '{self.name}': no recording has {least} rows; lower data.options.length or minimum")
        place, train_rows = (np.arange(count), counts[0]) if len(tracks) > 1 else set_aside(count, self.test)
        y, user = new("y", (count,), np.int64), new("user", (count,), np.int64) if tracks[0].user is not None else None
        x, moments, begin = new("x", (count, tracks[0].values.shape[1], self.length), np.float32), Moments(), 0
        with progress(f"cutting {self.name}", count) as advance:
            for track, (first, last) in zip(tracks, spans, strict=True):
                for at in range(0, len(first), PIECE):
                    piece = slice(at, at + PIECE)
                    windows = take_windows(track.values, first[piece], last[piece], self.length)
                    rows = place[begin : begin + len(windows)]
                    x[rows], y[rows] = windows, track.label[first[piece]]
                    if user is not None and track.user is not None:
                        user[rows] = track.user[first[piece]]
                    moments.add(windows[rows < train_rows])
                    begin += len(windows)
                    advance(len(windows))
        if user is not None:
            user[:] = np.unique(user, return_inverse=True)[1]  # some may have no window
        return {"train_rows": train_rows, "mean": moments.mean, "std": moments.std}

    def _spans(self, track: Track) -> tuple[np.ndarray, np.ndarray]:
        ids = [track.label] if track.user is None else [track.label, track.user]
        return place_windows(recordings(ids, track.time, self.gap), self.length, self.overlap, self.minimum)


def _seconds(rows: Rows, column: str, unit: str) -> np.ndarray:
    import pyarrow as pa

    values = rows.column(column)
    if pa.types.is_timestamp(values.type):
        unit, values = values.type.unit, values.cast(pa.int64())
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        raise DataError(f"{rows.paths[0]}: column '{column}' holds {values.type}, not times; set data.options.time")
    return np.asarray(values.to_numpy()).astype(np.float64) * _UNITS[unit]  # NaN where missing, which ends a recording


def _values(rows: Rows, columns: Sequence[str]) -> np.ndarray:
    import pyarrow as pa

    out = np.empty((rows.count, len(columns)), dtype=np.float32)
    for channel, column in enumerate(columns):
        kind = rows.type_of(column)
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise DataError(f"{rows.paths[0]}: column '{column}' holds {kind}, not numbers; set data.options.columns")
        out[:, channel] = rows.column(column).to_numpy()
        if not np.isfinite(out[:, channel]).all():
            row = int((~np.isfinite(out[:, channel])).argmax())
            raise DataError(f"{rows.place(row)} has a missing or infinite number in '{column}'; leave such rows away")
    return out
