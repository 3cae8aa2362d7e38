"""Sensor windows, one in each row: `windows` for a folder of your own, and UCI HAR."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.progress import progress
from holdfast.core.registry import register, setting
from holdfast.data.cache import New
from holdfast.data.list_columns import first_shape, read_lists
from holdfast.data.moments import Moments
from holdfast.data.row_order import RowOrder
from holdfast.data.sources.base import USER_HELP
from holdfast.data.sources.labelled import LabelledSource, Scale

NUMBERS = 1 << 22  # numbers read at once


@register("source", "windows")
class Windows(LabelledSource):
    """Sensor windows of your own: Parquet files with a list of numbers in each row. For rows that must still
    be cut, see `recordings`.

    A sample is [channels, length], normalised channel by channel. Lists may be of any numbers, also lists of
    lists, all of one length. Licence: that of your data.
    """

    numbers: ClassVar[int | None] = None  # numbers in a window of a known dataset
    signal: str = setting("signal", "column of the windows, each a list of numbers")
    channels: int = setting(1, "number of channels of a window", ge=1)
    order: Literal["channels", "time"] = setting(
        "channels", "order of a list: channel after channel, or moment after moment (time)"
    )

    def _fill(self, order: RowOrder, new: New) -> Scale:
        shape = first_shape(order.parts[0], self.signal)
        width = math.prod(shape)
        if self.numbers and width != self.numbers:
            raise DataError(
                f"{order.parts[0].place(0)} has {width} numbers in '{self.signal}', expected {self.numbers}"
            )
        if not width or width % self.channels:
            raise DataError(
                f"{order.parts[0].place(0)} has {width} numbers in '{self.signal}', not {self.channels}"
                " channels of equal length; set data.options.channels"
            )
        x, moments, begin = (
            new("x", (order.count, self.channels, width // self.channels), np.float32),
            Moments(),
            0,
        )
        with progress(f"reading {self.name}", order.count) as advance:
            for rows in order.parts:
                at = 0  # row in this split
                for batch in rows.batches([self.signal], max(1, min(1024, NUMBERS // width))):
                    windows = self._shaped(read_lists(batch.column(0), shape, self.signal, rows, at))
                    place = order.place[begin : begin + len(windows)]
                    x[place] = windows
                    moments.add(windows[place < order.train_rows])
                    at, begin = at + len(windows), begin + len(windows)
                    advance(len(windows))
        return moments.mean, moments.std

    def _shaped(self, flat: np.ndarray) -> np.ndarray:
        """[n, channels, length]"""
        if self.order == "channels":
            return flat.reshape(len(flat), self.channels, -1)
        return flat.reshape(len(flat), -1, self.channels).transpose(0, 2, 1)


@register(
    "source",
    "uci-har",
    paper=(
        "Anguita et al.: A Public Domain Dataset for Human Activity Recognition Using Smartphones, ESANN 2013"
    ),
)
class UciHar(Windows):
    """UCI HAR: 7,352 + 2,947 windows of a phone's sensors, [9, 128], 30 users, 6 activities; split by user.

    Columns user (1..30), signal (1,152 numbers: body acceleration x, y, z, gyroscope x, y, z and total
    acceleration x, y, z, 128 of each, at 50 Hz), label. Neighbouring windows of the original share half of
    their time, so a client's own train and test samples overlap. Licence: its README prohibits commercial
    use, UCI lists CC BY 4.0.

    """

    classes: ClassVar[int | None] = 6
    class_names: ClassVar[tuple[str, ...]] = (
        "WALKING",
        "WALKING_UPSTAIRS",
        "WALKING_DOWNSTAIRS",
        "SITTING",
        "STANDING",
        "LAYING",
    )
    numbers: ClassVar[int | None] = 1152
    channels: int = setting(9, "number of channels of a window", ge=1)
    user: str | None = setting("user", USER_HELP)
