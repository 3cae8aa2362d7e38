"""benchmarks/scale.py: the formula on numbers computed by hand, parts that are missing, and the page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import scale_parts
from benchmarks.scale import (
    ADAPTERS,
    LINKS,
    PAGE,
    Links,
    Model,
    Rules,
    costs,
    crossings,
    models,
    read,
    rules,
    sizes,
    table_of_seconds,
    tables,
    updated,
)

MODEL = Model("tiny", 1_000, {2: 2e-3, 20: 1e-3})
RULE, SLOW = Rules(mean=1e-6, gram=2e-6, sort=4e-6), Links(network=1e9, disk=1e8)


def test_a_round_on_eight_gpus() -> None:
    """1,000 clients send 4,000 bytes each; seven eighths of what a GPU holds goes over its link."""
    assert costs(MODEL, 8, RULE, SLOW) == pytest.approx(
        {
            "train": 12.5,
            "rows to columns": 4.375e-4,
            "weighted sum": 1.25e-4,
            "Gram": 2.5e-4 + 7e-3,
            "sort": 5e-4,
            "model to all": 3.5e-6,
            "private rows": 0.08,
            "server: mean": 5.66e-4,
            "server: krum": 7.691e-3,
            "server: median": 9.41e-4,
            "round": 12.500941,
            "round, private rows": 12.580941,
        }
    )


def test_one_gpu_sends_nothing_and_eight_machines_share_the_private_rows() -> None:
    alone = costs(MODEL, 1, RULE, SLOW)
    assert alone["rows to columns"] == alone["model to all"] == 0 and alone["Gram"] == pytest.approx(2e-3)
    assert alone["train"] == pytest.approx(100)
    many = costs(MODEL, 64, RULE, Links(1e9, 1e3))
    assert many["private rows"] == pytest.approx(8e6 / 8 / 1e3)
    assert many["round, private rows"] == pytest.approx(many["round"] + many["private rows"])
    slow = costs(MODEL, 1, RULE, Links(1e9, 1e3))  # one process writes them beside the next round
    assert slow["round, private rows"] == slow["private rows"] == pytest.approx(8e3)
    assert many["train"] == pytest.approx(1_000 * 100 * 2e-3 / 64), (
        "16 clients are fewer than 20: the slower step"
    )


def test_bytes() -> None:
    assert sizes(MODEL, 8) == {
        "each client, down and up": 8_000,
        "cohort, down and up": 8e6,
        "out of each GPU": 437_500,
        "updates on a GPU": 1e6,
        "private rows, all": 4e8,
        "private rows, each machine": 4e8,
    }
    assert sizes(MODEL, 1)["updates on a GPU"] == 4e6 and sizes(MODEL, 1)["out of each GPU"] == 0


def test_where_other_terms_are_as_long_as_training() -> None:
    found = crossings(MODEL, RULE, SLOW)
    assert found["steps"] == pytest.approx(100 * 9.41e-4 / 12.5)
    assert found["network"] == pytest.approx(437_500 / 12.5) and found["disk"] == pytest.approx(8e6 / 12.5)
    assert found["cohort"] == pytest.approx(1_000 * 100 / 2e-3)


def test_the_seconds_of_a_column_come_from_the_measured_stack() -> None:
    part = {"clients": 1_000, "columns": 500, "seconds": 1.0}
    assert rules({"mean": part, "gram": part, "sort": part}) == Rules(2e-3, 2e-3, 2e-3)
    with pytest.raises(SystemExit, match="1000 clients"):
        rules({"mean": part, "gram": part, "sort": {**part, "clients": 100}})


def test_a_step_that_nobody_measured_is_open() -> None:
    record = read()
    assert "adapters" not in record["cuda"], "then the page has no open row: change its text"
    row = next(line for line in table_of_seconds(record, LINKS).splitlines() if "| LoRA of" in line)
    assert "| 100,000 S |" in row
    assert costs(Model("open", 10, {}), 8, RULE, SLOW)["round"] is None
    record["cuda"]["adapters"] = {"seconds": 0.01, "stack": 1}
    assert " S |" not in table_of_seconds(record, LINKS)


def test_the_adapters_of_the_measured_network_are_those_of_the_table() -> None:
    with torch.device("meta"):
        _, trained = scale_parts.transformer()
    assert sum(value.numel() for value in trained) == ADAPTERS == models(read())[2].sent == 995_328


def test_every_part_says_where_it_comes_from() -> None:
    for parts in read().values():
        for part in parts.values():
            assert part.keys() >= {"what", "seconds", "command", "device", "date", "versions"}


def test_the_page_has_the_tables_of_the_record() -> None:
    page = PAGE.read_text()
    assert updated(page, tables(read(), LINKS)) == page, "run python benchmarks/scale.py --docs"


def test_the_parts_of_the_server_are_measured() -> None:
    found = scale_parts.server_parts(torch.device("cpu"), 64, 1)
    assert found.keys() == {"mean", "gram", "sort"} and all(part["seconds"] > 0 for part in found.values())


@pytest.mark.slow
def test_measuring_on_a_cpu_adds_its_parts_to_the_record(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"cuda": {"kept": {}}, "cpu": {"old": {}}}))
    command = ["benchmarks/scale.py", "--measure", "cpu", "--columns", "64", "--repeats", "1"]
    subprocess.run(
        [sys.executable, *command, "--parts", str(record)],
        cwd=PAGE.parents[1],
        check=True,
        capture_output=True,
        timeout=240,
    )
    found = json.loads(record.read_text())
    assert found["cuda"] == {"kept": {}} and "old" in found["cpu"]
    part = found["cpu"]["rows to columns"]
    assert part["bytes sent by each"] == 4 * 500 * 32 and part["seconds"] > 0
