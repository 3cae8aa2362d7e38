"""benchmarks/aggregators.py on a tiny size: every rule has its line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import built_in

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_rule_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "rules.json"
    size = ["--clients", "7", "--numbers", "50", "--turns", "1"]
    command = [sys.executable, "benchmarks/aggregators.py", *size, "--markdown", "--out", str(out)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    rows = {row["rule"]: row for row in json.loads(out.read_text())}
    assert set(rows) == {"w @ x", "gram", "sort", "foolsgold, no memory", *built_in("aggregator")}
    assert all(row["seconds"] > 0 and row["n"] == 7 and row["d"] == 50 for row in rows.values())
    assert rows["w @ x"]["per w @ x"] == 1.0 and rows["sort"]["per sort"] == 1.0
    assert all(f"\n  {name} " in done.stdout for name in rows)
    table = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert table[0] == "| rule | beside | n = 7, d = 5e1 |" and len(table) == 1 + len(rows)
    assert any(line.startswith("| `krum` | `gram` | ") and line.count("x, ") == 1 for line in table)
