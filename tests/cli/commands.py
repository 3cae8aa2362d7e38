"""What tests of the command line share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

HERE = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}  # for processes of their own


class Answer(NamedTuple):
    code: int
    out: str
    err: str


def refused(answer: Answer, *fragments: str) -> None:
    """One line that names the cause, and exit code 2."""
    assert answer.code == 2, answer.err
    assert answer.out == ""
    lines = answer.err.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and lines[-1] == errors[0], answer.err
    assert "Traceback" not in answer.err
    for fragment in fragments:
        assert fragment in errors[0]
