from __future__ import annotations

import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.registry import build
from holdfast.data.sources import recordings
from holdfast.data.sources.wisdm import RAW, read_raw
from tests.data.folders import write_table

NS = 50_000_000  # one row at 20 Hz


def load(name: str, dir: Path, **options: Any) -> Any:
    return build("source", {"name": name, **options}).load(dir)


def track(*pieces: tuple[int, str, int], start: int = 1) -> dict[str, list]:
    """Pieces of (user, activity, rows), one after the other; x counts the rows, y is 10 x, z is 0."""
    rows = [(user, activity) for user, activity, count in pieces for _ in range(count)]
    count = len(rows)
    x = [float(row) for row in range(count)]
    time = [(start + row) * NS for row in range(count)]
    user, activity = [row[0] for row in rows], [row[1] for row in rows]
    return {
        "user": user,
        "activity": activity,
        "timestamp": time,
        "x": x,
        "y": [10 * v for v in x],
        "z": [0.0] * count,
    }


def test_wisdm_in_windows_of_200_rows(tmp_path: Path) -> None:
    write_table(
        tmp_path / "wisdm" / "train.parquet",
        track((33, "Walking", 450), (7, "Jogging", 199), (7, "Sitting", 200)),
    )
    samples = load("wisdm", tmp_path, test=0)
    assert samples.x.shape == (3, 3, 200) and samples.x.dtype == torch.float32 and samples.train_rows == 3
    assert samples.x[:, 0, 0].tolist() == [0, 200, 649] and samples.x[1, 1, :3].tolist() == [2000, 2010, 2020]
    assert samples.class_names == ("Jogging", "Sitting", "Walking") and samples.y.tolist() == [2, 2, 1]
    assert samples.user.tolist() == [1, 1, 0]  # 7 is user 0, 33 is user 1
    assert samples.mean[2] == 0 and samples.std[2] == 1
    filled = load("wisdm", tmp_path, test=0, minimum=50)
    assert (
        filled.x[:, 0, 0].tolist() == [0, 200, 400, 450, 649]
        and filled.x[2, 0, 49:].tolist() == [449.0] * 151
    )
    assert load("wisdm", tmp_path, test=0, overlap=0.5).x[:, 0, 0].tolist() == [0, 100, 200, 649]
    assert len(load("wisdm", tmp_path, test=0, length=100)) == 4 + 1 + 2


def test_gaps_and_times_that_go_back_end_a_recording_and_rows_without_a_time_are_left_out(
    tmp_path: Path,
) -> None:
    columns = track((1, "Walking", 30))
    time = columns["timestamp"]
    time[10:] = [t + 2 * 10**9 for t in time[10:]]
    time[20:] = [t - 10**10 for t in time[20:]]
    time[25] = 0
    write_table(tmp_path / "wisdm" / "train.parquet", columns)
    options: dict[str, Any] = {"length": 4, "test": 0}
    assert load("wisdm", tmp_path, **options).x[:, 0, 0].tolist() == [0, 4, 10, 14, 20, 24]
    assert load("wisdm", tmp_path, **options).x[5, 0].tolist() == [24, 26, 27, 28]
    assert load("wisdm", tmp_path, **options, gap=3).x[:, 0, 0].tolist() == [0, 4, 8, 12, 16, 20, 24]
    assert load("wisdm", tmp_path, **options, time=None).x[:, 0, 0].tolist() == [0, 4, 8, 12, 16, 20, 24]


@pytest.mark.parametrize(("unit", "factor"), [("us", 1e3), ("ms", 1e6), ("s", 1e9), (None, 1)])
def test_times_in_other_units(tmp_path: Path, unit: str | None, factor: float) -> None:
    columns: dict[str, Any] = track((1, "a", 8))
    columns["timestamp"] = [
        t / factor + (t > 4 * NS) * 2e9 / factor for t in columns["timestamp"]
    ]  # two seconds pass after four rows
    if unit is None:
        columns["timestamp"] = pa.array([int(t) for t in columns["timestamp"]], pa.timestamp("ns"))
    write_table(tmp_path / "mine" / "train.parquet", columns)
    named: dict[str, Any] = {
        "folder": "mine",
        "label": "activity",
        "time": "timestamp",
        "length": 3,
        "test": 0,
        "unit": unit or "s",
    }
    assert load("recordings", tmp_path, **named).x[:, 0, 0].tolist() == [0, 4]


def test_recordings_of_your_own_with_a_test_split(tmp_path: Path) -> None:
    write_table(tmp_path / "mine" / "train.parquet", {"g": [1, 2, 3, 4, 5], "label": [0, 0, 1, 1, 1]})
    write_table(tmp_path / "mine" / "test.parquet", {"g": [6, 7], "label": [1, 1]})
    samples = load("recordings", tmp_path, folder="mine", columns=["g"], length=2)
    assert (
        samples.x.tolist() == [[[1, 2]], [[3, 4]], [[6, 7]]]
        and samples.train_rows == 2
        and samples.y.tolist() == [0, 1, 1]
    )
    assert samples.mean == (2.5,) and samples.user is None


def test_a_share_is_set_aside_and_every_window_stays_whole(tmp_path: Path) -> None:
    write_table(tmp_path / "wisdm" / "train.parquet", track(*((user, "a", 20) for user in range(10))))
    samples = load("wisdm", tmp_path, length=10, test=0.25)
    assert samples.train_rows == 15 and sorted(samples.x[:, 0, 0].tolist()) == list(range(0, 200, 10))
    assert torch.equal(samples.user, (samples.x[:, 0, 0] // 20).long())


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"x": None}, {}, "no column 'x'"),
        ({"activity": None}, {}, "no column 'activity'"),
        ({"x": ["a"] * 10}, {}, "column 'x' holds string, not numbers; set data.options.columns"),
        ({"y": [0.0] * 9 + [None]}, {}, "train.parquet: row 9 has a missing or infinite number in 'y'"),
        ({"timestamp": ["a"] * 10}, {}, "column 'timestamp' holds string, not times"),
        ({"user": [1] * 9 + [None]}, {}, "row 9 has no value in 'user'"),
        ({}, {"length": 11}, "no recording has 11 rows; lower data.options.length or minimum"),
        ({"timestamp": [0] * 10}, {}, "no recording has 5 rows"),
    ],
)
def test_damaged_rows_are_a_one_line_error(tmp_path: Path, change: dict, options: dict, message: str) -> None:
    columns = {
        name: values for name, values in {**track((1, "a", 10)), **change}.items() if values is not None
    }
    write_table(tmp_path / "wisdm" / "train.parquet", columns)
    with pytest.raises(DataError, match=message) as error:
        load("wisdm", tmp_path, **{"length": 5, **options})
    assert "\n" not in str(error.value)


def test_values_are_never_held_in_memory_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, channels = 100_000, 48
    names = [f"c{channel}" for channel in range(channels)]
    values = np.random.default_rng(0).normal(size=(rows, channels)).astype(np.float32)
    columns = {"label": np.arange(rows) // 30_000, **dict(zip(names, values.T.copy(), strict=True))}
    write_table(tmp_path / "gait" / "train.parquet", columns, rows=5000)
    for name, size in (("READ", 1000), ("NUMBERS", 1 << 16)):
        monkeypatch.setattr(recordings, name, size)
    pool, before = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        samples = load("recordings", tmp_path, folder="gait", columns=names, length=100, test=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)
    assert samples.x.shape == (1000, channels, 100)
    assert np.array_equal(samples.x.numpy(), values.reshape(1000, 100, channels).transpose(0, 2, 1))
    assert peak < values.nbytes / 3 and pool.max_memory() < values.nbytes / 3  # NumPy's, and Arrow's


def test_users_without_a_window_are_not_counted(tmp_path: Path) -> None:
    columns = track((-4, "a", 20), (3, "a", 5), (9, "b", 20))
    write_table(tmp_path / "wisdm" / "train.parquet", columns)
    assert load("wisdm", tmp_path, length=10, test=0).user.tolist() == [0, 0, 1, 1]


def test_a_minimum_beyond_the_length_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="minimum is 11 but a window has length 10"):
        build("source", {"name": "wisdm", "length": 10, "minimum": 11}, "data.options")


def test_users_without_a_window_leave_no_gap(tmp_path: Path) -> None:
    write_table(
        tmp_path / "wisdm" / "train.parquet", track((9, "Walking", 20), (5, "Walking", 3), (2, "Walking", 20))
    )
    assert load("wisdm", tmp_path, length=20, test=0).user.tolist() == [1, 0]


# ---- the text file of v1.1 ----

ODD = """33,Jogging,49105962326000,-0.6946377,12.680544,0.50395286;
33,Jogging,49106062271000,5.012288,11.264028,0.95342433;33,Jogging,49106112167000,4.903325,10.882658,-0.08172209;

33,Jogging,49106222305000,-0.61291564,18.496431,3.0237172
33,Jogging,49106332290000,-1.1849703,12.108489,7.205164;;
33,Jogging,49106442306000,1.3756552,-2.4925237,-6.510526,;
11,Walking,1867172313000,4.4,4.4,;
11,Walking,0,0.0,0.0,0.0;
11,Walking,1867222270000,1.0,2.0;
11,Walking,1867272297000,1.0,2.0,3.0,4.0;
11,Walking,18672x,1.0,2.0,3.0;
11,Walking,1867322277000,1.0,nan,3.0;
11,,1867322277000,1.0,1.0,3.0;
11,Walking,99999999999999999999,1.0,1.0,3.0;
11,Walking,1867322277000,1.0,1.0,1e99;
11,Walking,1867372288000,1.0,2.0,3.0;
"""


def test_irregular_records_of_the_text_file_are_read_or_dropped(tmp_path: Path) -> None:
    (tmp_path / RAW).write_text(ODD)
    with pytest.warns(UserWarning, match="8 damaged records and 1 without a time are left out, 7 remain"):
        raw = read_raw(tmp_path / RAW)
    assert (
        raw.dropped == 8
        and raw.user.tolist() == [33] * 6 + [11] * 2
        and raw.activity.tolist() == ["Jogging"] * 6 + ["Walking"] * 2
    )
    assert raw.time.tolist()[-2:] == [0, 1867372288000]
    np.testing.assert_array_equal(
        raw.values[[1, 2, 5]],
        np.array(
            [
                [5.012288, 11.264028, 0.95342433],
                [4.903325, 10.882658, -0.08172209],
                [1.3756552, -2.4925237, -6.510526],
            ],
            dtype=np.float32,
        ),
    )


def test_text_and_parquet_give_the_same_samples(tmp_path: Path) -> None:
    columns = track((3, "Walking", 60), (20, "Jogging", 45), (3, "Sitting", 41))
    columns["timestamp"][70] = 0
    write_table(tmp_path / "a" / "wisdm" / "train.parquet", columns)
    lines = [",".join(map(str, row)) + ";" for row in zip(*columns.values(), strict=True)]
    (tmp_path / "b" / "WISDM_ar_v1.1").mkdir(parents=True)
    (tmp_path / "b" / "WISDM_ar_v1.1" / RAW).write_text("\n".join(lines))
    options: dict[str, Any] = {"length": 20, "overlap": 0.25, "minimum": 5}
    with pytest.warns(UserWarning, match="0 damaged records and 1 without a time"):
        text = load("wisdm", tmp_path / "b", **options)
    parquet = load("wisdm", tmp_path / "a", **options)
    for name in ("x", "y", "user"):
        assert torch.equal(getattr(text, name), getattr(parquet, name))
    assert (text.mean, text.std, text.class_names, text.train_rows) == (
        parquet.mean,
        parquet.std,
        parquet.class_names,
        parquet.train_rows,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # from the cache: nothing is read, and nothing said again
        assert torch.equal(
            load("wisdm", tmp_path, folder=str(tmp_path / "b" / "WISDM_ar_v1.1"), **options).x, text.x
        )


def test_an_earlier_place_takes_precedence_for_text_and_parquet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write_table(here / "wisdm" / "train.parquet", track((3, "Walking", 60)))
    (there / "wisdm").mkdir(parents=True)
    (there / "wisdm" / RAW).write_text("".join(f"1,Jogging,{row * NS},1,2,3;\n" for row in range(1, 60)))
    for first, second, wanted in ((here, there, "Walking"), (there, here, "Jogging")):
        monkeypatch.setenv("HOLDFAST_DATA", str(second))
        assert load("wisdm", first, length=20).class_names == (wanted,)
    assert load("wisdm", tmp_path / "nowhere", length=20).class_names == ("Walking",)
    monkeypatch.delenv("HOLDFAST_DATA")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=f"wisdm/ with train.parquet .*, or with {RAW}$"):
        load("wisdm", tmp_path / "nowhere")


def test_a_text_file_without_a_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wisdm").mkdir()
    (tmp_path / "wisdm" / RAW).write_bytes(b"<html>\xff\n404;\n")
    with pytest.raises(DataError, match=f"{RAW}: no record like"):
        load("wisdm", tmp_path)


def test_the_real_recordings_of_2019(real: Callable[[str], Path]) -> None:
    samples = load("wisdm", real("wisdm_2019_phone_accel"), folder="wisdm_2019_phone_accel", test=0)
    assert (
        samples.x.shape == (6896, 3, 200)
        and samples.classes == 18
        and samples.class_names[16:] == ("walking", "writing")
    )
    assert samples.user.unique().tolist() == list(range(22)) and samples.x.abs().max() < 20.3
    assert samples.y[0] == 16 and samples.user[0] == 0
    np.testing.assert_allclose(
        samples.x[0, :, :3],
        [[-0.364761, -0.879730, 2.001495], [8.793503, 9.768784, 11.109070], [1.055084, 1.016998, 2.619156]],
        atol=1e-5,
    )
    assert (
        len(
            load(
                "wisdm", real("wisdm_2019_phone_accel"), folder="wisdm_2019_phone_accel", overlap=0.5, test=0
            )
        )
        == 13719
    )
