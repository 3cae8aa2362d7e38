"""benchmarks/together.py on a tiny size: together starts a small part of the operations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_together_starts_fewer_operations_and_waits_less(tmp_path: Path) -> None:
    out = tmp_path / "together.json"
    size = ["--experiments", "8", "--clients", "7", "--numbers", "50", "--turns", "1"]
    command = [sys.executable, "benchmarks/together.py", "krum", "fedcpa", "clip", *size, "--markdown"]
    done = subprocess.run(
        [*command, "--out", str(out)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    rows = {row["rule"]: row for row in json.loads(out.read_text())}
    assert set(rows) == {"krum", "fedcpa", "clip"} and "| `krum` | " in done.stdout
    for name in ("krum", "clip"):
        assert rows[name]["operations together"] * 4 < rows[name]["operations one by one"]
        assert rows[name]["waits together"] * 8 == rows[name]["waits one by one"]
        assert rows[name]["microseconds together, d = 50"] > 0
    assert rows["fedcpa"]["operations together"] is None  # reduced one by one
