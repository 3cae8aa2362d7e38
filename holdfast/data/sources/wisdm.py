"""WISDM: accelerometer rows of a phone, as a Parquet folder or as the text file that its authors publish."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.progress import progress
from holdfast.core.registry import register, setting
from holdfast.data.cache import New
from holdfast.data.samples import Samples
from holdfast.data.sources.base import USER_HELP
from holdfast.data.sources.recordings import Recordings, SensorRows

RAW = "WISDM_ar_v1.1_raw.txt"
_MOST = 1 << 32  # bytes; the published file has 50 MB
_LINE = 1 << 16  # characters read at a time where no line ends
_NAME = 100  # characters of an activity: all are stored as long as the longest


@register(
    "source",
    "wisdm",
    paper=(
        "Kwapisz, Weiss, Moore: Activity Recognition using Cell Phone Accelerometers, SIGKDD Explorations"
        " 2010"
    ),
)
class Wisdm(Recordings):
    """WISDM v1.1: 1,098,207 rows of an accelerometer at 20 Hz, 36 users, 6 activities, cut into windows [3,
    200] of ten seconds.

    Columns user, activity, timestamp (ns), x, y, z; or the original text file WISDM_ar_v1.1_raw.txt in the
    folder. There is no official split. Rows whose timestamp is 0 hold no measurement and are left out. For
    the lab's later recordings of 18 activities set folder, for example to wisdm_2019_phone_accel. Licence:
    none stated; its authors ask to cite the paper.
    """

    also: ClassVar[tuple[str, ...]] = ("WISDM_ar_v1.1",)
    label: str = setting(
        "activity", "column of the labels: class numbers, or words, which are numbered in sorted order"
    )
    user: str | None = setting("user", USER_HELP)
    time: str | None = setting(
        "timestamp", "column of the times; none: only a new user or label ends a recording"
    )

    def load(self, dir: Path | None) -> Samples:
        text = self._find(dir, instead=RAW).get(RAW)
        return self._read(text, lambda new: self._make_from_text(text[0], new)) if text else super().load(dir)

    def _make_from_text(self, path: Path, new: New) -> dict[str, Any]:
        rows = read_raw(path)
        names, label = np.unique(rows.activity, return_inverse=True)
        user = np.unique(rows.user, return_inverse=True)[1]
        track = SensorRows(label.astype(np.int64), user.astype(np.int64), rows.time * 1e-9, [rows.values])
        return {"classes": len(names), "class_names": tuple(map(str, names)), **self._windows([track], new)}

    def _windows(self, tracks: Iterable[SensorRows], new: New) -> dict[str, Any]:
        return super()._windows(
            (track if track.time is None else track.only(track.time != 0) for track in tracks), new
        )


@dataclass(frozen=True, eq=False)
class WisdmRecords:
    """The records of the text file."""

    user: np.ndarray  # [rows] int64
    activity: np.ndarray  # [rows] str
    time: np.ndarray  # [rows] int64, ns
    values: np.ndarray  # [rows, 3] float32
    dropped: int  # number of damaged records


def read_raw(path: Path) -> WisdmRecords:
    """Read records like 33,Jogging,49105962326000,-0.69,12.68,0.50; some lack the semicolon, a number, or
    their own line."""
    user, time, values = array("q"), array("q"), array("f")
    activity: list[str] = []
    if path.stat().st_size > _MOST:
        raise DataError(f"{path} has more than {_MOST:,} bytes; download it again")
    dropped = 0
    with (
        open(path, encoding="utf-8", errors="replace") as file,
        progress(f"reading {path.name}", path.stat().st_size) as advance,
    ):
        while line := file.readline(_LINE):
            for text in line.split(";"):
                text = text.strip().rstrip(",")
                record = _record(text)
                if record is not None:
                    user.append(record[0])
                    activity.append(record[1])
                    time.append(record[2])
                    values.extend(record[3])
                elif text:
                    dropped += 1
            advance(len(line))
    if not user:
        raise DataError(
            f"{path}: no record like 33,Jogging,49105962326000,-0.69,12.68,0.50; download it again"
        )
    timeless = time.count(0)
    if dropped or timeless:
        lost = f"{dropped:,} damaged records and {timeless:,} without a time"
        warnings.warn(
            f"{path}: {lost} are left out, {len(user) - timeless:,} remain", UserWarning, stacklevel=2
        )
    columns = np.array(user, dtype=np.int64), np.array(activity), np.array(time, dtype=np.int64)
    return WisdmRecords(*columns, np.array(values, dtype=np.float32).reshape(-1, 3), dropped)


def _record(text: str) -> tuple[int, str, int, tuple[float, float, float]] | None:
    """Parse one record; None where a field is missing, too many, or not a number."""
    fields = text.split(",")
    if len(fields) != 6:
        return None
    try:
        x, y, z = float(fields[3]), float(fields[4]), float(fields[5])
        user, time, activity = int(fields[0]), int(fields[2]), fields[1].strip()
    except ValueError:
        return None
    # False where a value is NaN
    finite = abs(x) + abs(y) + abs(z) < 1e30 and max(abs(user), abs(time)) < 2**63
    sound = finite and 0 < len(activity) <= _NAME
    return (user, activity, time, (x, y, z)) if sound else None
