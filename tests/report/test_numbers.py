from __future__ import annotations

from holdfast.report.numbers import amount, duration, percent, percent_and_spread, points


def test_a_value_that_rounds_to_zero_has_no_sign() -> None:
    assert [percent(v) for v in (-0.0, -0.0004, -0.0006, 0.1234)] == ["0.0 %", "0.0 %", "−0.1 %", "12.3 %"]
    assert percent_and_spread(-0.0001, 0.00001) == "0.0 ± 0.0 %"
    assert percent_and_spread(0.847, None) == "84.7 %" and percent_and_spread(0.847, 0.029) == "84.7 ± 2.9 %"
    assert [points(v) for v in (-0.00004, 0.00004, 0.0123, -0.0123)] == [
        "0.00 points",
        "0.00 points",
        "+1.23 points",
        "−1.23 points",
    ]


def test_amounts_as_people_read_them() -> None:
    assert [amount(v) for v in (0, 999, 23_100_000, 4e15)] == ["0 B", "999 B", "23.1 MB", "4000.0 TB"]
    assert [duration(v) for v in (-1e-9, 3.21, 250, 7500)] == ["0.0 s", "3.2 s", "4 min 10 s", "2 h 5 min"]
