from __future__ import annotations

from benchmarks.docs_columns import PAGE, current


def test_the_table_of_metrics_is_current() -> None:
    assert PAGE.read_text() == current(), "run python -m benchmarks.docs_columns"
