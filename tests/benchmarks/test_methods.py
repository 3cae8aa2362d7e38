"""The table of every method: which methods are in it, and what it says about their runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from holdfast.experiment.config_tables import read_config
from holdfast.results.run import Run
from tests.helpers import built_in

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize("data", ["digits", "uci-har"])
def test_every_method_is_in_it(data: str) -> None:
    assert read_config(BENCHMARKS / "records" / f"methods-{data}.toml")["sweep"]["method.name"] == sorted(
        built_in("method")
    )


def test_a_table(
    tmp_path: Path, quick_disk: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("benchmark_methods", BENCHMARKS / "methods.py")
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    monkeypatch.setattr(benchmark, "TURNS", 1)
    small = [
        f"--set={change}"
        for change in ("train.rounds=2", "data.clients=4", "engine.plan=vmap", "train.local_epochs=1")
    ]
    monkeypatch.setattr(
        sys, "argv", ["methods.py", "--out", str(tmp_path), "--markdown", "--methods", "fedper", *small]
    )
    for _ in range(2):  # the second time nothing runs, and nothing changes
        benchmark.main()
    first, second = (part for part in capsys.readouterr().out.split("digits") if part)
    assert first == second
    rows = {
        row[0]: row[1:]
        for line in first.splitlines()
        if line.startswith("| `")
        for row in [line.strip("| ").split(" | ")]
    }
    assert set(rows) == {"`local`", "`fedper`"}
    final = Run(tmp_path / "digits" / "sweep" / "000-fedper_none").final
    assert rows["`fedper`"][0] == f"{100 * final['accuracy']:.1f} ({100 * final['accuracy/worst10']:.1f})"
    assert rows["`fedper`"][3] == f"{final['bytes/up'] / 2000:,.0f} / {final['bytes/down'] / 2000:,.0f}"
    alone = Run(tmp_path / "digits" / "alone" / "local-1").metrics
    seconds = sorted((alone["seconds/client"] + alone["seconds/server"]).tolist()[1:])
    assert rows["`local`"][4] == f"{seconds[len(seconds) // 2]:.3f}"
