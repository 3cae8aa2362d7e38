"""The fields and sliders of a page, driven in a headless browser: values can be read and rounds changed
without a pointer."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from holdfast.report.page import write_page
from holdfast.report.read_runs import read_records
from tests.report.conftest import sweep

browser = pytest.importorskip("benchmarks.browser")
_FIELD = "[...document.querySelectorAll('.cells')].find(one => one.querySelector('input'))"


@pytest.mark.slow
@pytest.mark.skipif(browser.find_browser() is None, reason=browser.MISSING)
def test_keys_read_values_and_move_the_slider(tmp_path: Path) -> None:
    data = {"clients": 5, "partition": {"name": "dirichlet", "beta": 0.5, "samples_per_client": 30}}
    folder = sweep(
        tmp_path / "x",
        method={"name": "fedcap", "detect": False},
        data=data,
        attack={"name": "ipm", "fraction": 0.2},
    )
    run, page = read_records(folder)[0].run, write_page(folder)
    matrix = run.table("customisation")
    bad = run.malicious()[0]
    first = next(client for client in range(5) if client != bad)  # attackers stand first, then the others
    with browser.Browser() as shown:
        shown.open(page)
        shown.run(f"{_FIELD}.focus()")
        shown.press("ArrowRight")
        value = matrix.query(f"round == 3 and client == {bad} and other == {first}")["value"].item()
        where, said = shown.run("tip.innerText").split("\n")
        assert where == f"client ▲ {bad}, model of {first}" and float(
            said.removesuffix(" %")
        ) == pytest.approx(100 * value, abs=0.1)
        for round in (3, 2):
            assert shown.run(f"{_FIELD}.querySelector('output').textContent") == str(round)
            texts = shown.run(
                f"[...{_FIELD}.querySelectorAll('.counts text')].map(one => Number(one.textContent))"
            )
            assert texts == pytest.approx([100 * v for v in _in_order(matrix, round, bad)], abs=0.6)
            shown.run(f"{_FIELD}.querySelector('input').focus()")
            shown.press("ArrowLeft")
        assert shown.errors == []


def _in_order(matrix: pd.DataFrame, round: int, bad: int) -> list[float]:
    order = [bad, *(client for client in range(5) if client != bad)]
    wide = matrix[matrix["round"] == round].pivot(index="client", columns="other", values="value")
    return wide.reindex(index=order, columns=order).to_numpy().flatten().tolist()
