"""Every line of the threat model in docs/federation.md names a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_each_threat_names_tests_that_exist() -> None:
    page = (HERE.parents[1] / "docs" / "federation.md").read_text()
    section = page.partition("## Threat model")[2].partition("\n## ")[0]
    lines = [
        line
        for line in section.splitlines()
        if line.startswith("| ") and not line.startswith("| who | tries")
    ]
    tests = set(
        re.findall(
            r"^def (test_\w+)", "\n".join(file.read_text() for file in HERE.glob("test_*.py")), flags=re.M
        )
    )
    assert len(lines) >= 17
    for line in lines:
        named = re.findall(r"`(test_\w+)`", line)
        assert named and set(named) <= tests, line
