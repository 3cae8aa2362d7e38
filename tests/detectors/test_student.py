from __future__ import annotations

import pytest

from holdfast.detectors.student import cdf, quantile


@pytest.mark.parametrize(
    ("p", "df", "printed"),
    [
        (0.95, 1, 6.313752), (0.95, 2, 2.919986), (0.95, 3, 2.353363), (0.95, 4, 2.131847), (0.95, 5, 2.015048), (0.95, 10, 1.812461),
        (0.95, 100, 1.660234), (0.99, 7, 2.997952), (0.975, 30, 2.042272), (0.9, 45, 1.300649), (0.05, 3, -2.353363),
    ],
)  # fmt: skip
def test_printed_tables(p: float, df: int, printed: float) -> None:
    assert quantile(p, df) == pytest.approx(printed, abs=2e-6)
    assert cdf(quantile(p, df), df) == pytest.approx(p, abs=1e-12)


def test_the_middle_and_the_limit() -> None:
    assert quantile(0.5, 4) == pytest.approx(0, abs=1e-300)
    assert quantile(0.95, 100_000) == pytest.approx(1.644854, abs=3e-5)  # the normal distribution's
    assert quantile(0.999999, 1) == pytest.approx(318309.886, rel=1e-5)
