from __future__ import annotations

from holdfast.report.markup import breakable
from holdfast.report.row_chart import Row, dot, percentage, piles, row_chart, stacked


def test_places_are_shares_of_the_axis() -> None:
    """A dot at a quarter of the axis, whatever the width of the screen; ticks at both ends."""
    marks = [dot("client", 0.25, 20.0, "client 3")]
    text = row_chart([Row("c0 d0", 0, "fed<avg>", marks)], 40, [(0.0, "0 %"), (1.0, "100 %")], "every client")
    assert 'cx="25%"' in text and 'data-line="0"' in text and "fed&lt;avg&gt;" in text
    assert 'x="0%" y="14">0 %' in text and 'x="100%" y="14">100 %' in text
    assert [percentage(v) for v in (0.0, 1 / 3, 1.0)] == ["0%", "33.33%", "100%"]


def test_dots_that_would_cover_each_other_are_piled() -> None:
    """On 850 pixels, dots 7 pixels apart: 0.5 and 0.501 share a place, 0.6 does not. Three of a pile lie at
    -5, 0 and 5; many are pressed together."""
    assert piles([0.5, 0.501, 0.6]) == [[0, 1], [2]]
    assert [stacked(3, 40, 5.0)(i) for i in range(3)] == [-5.0, 0.0, 5.0]
    assert stacked(100, 40, 5.0)(0) == -0.4 * 99 / 2


def test_names_break_after_joints_only() -> None:
    assert breakable("aggregator=trimmed-mean seed=0") == "aggregator=<wbr>trimmed-mean seed=0"
    assert breakable("accuracy/worst10 <b>") == "accuracy/<wbr>worst10 &lt;b&gt;"
