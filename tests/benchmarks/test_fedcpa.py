"""benchmarks/fedcpa.py on a tiny size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_round_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "round.json"
    command = [
        sys.executable,
        "benchmarks/fedcpa.py",
        "--clients",
        "10",
        "--numbers",
        "20000",
        "--still",
        "0.2",
        "--out",
        str(out),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["n"] == 10 and found["d"] == 20_000 and found["seconds"] > 0 and "seconds" in done.stdout
    assert found["weight of the honest"] > found["weight of the others"]
