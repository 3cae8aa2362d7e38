"""docs/federation.md and docs/reliability.md name files and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = (ROOT / "docs" / "federation.md").read_text()
FILES = [*HERE.glob("test_*.py"), HERE.parent / "report" / "test_watch.py"]
TESTS = set(re.findall(r"^def (test_\w+)", "\n".join(file.read_text() for file in FILES), flags=re.M))


def rows(title: str) -> list[str]:
    """The lines of the table in a section, without its head."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][1:]


def test_each_threat_names_tests_that_exist() -> None:
    threats = rows("Threat model")
    assert len(threats) >= 17
    for line in threats:
        named = re.findall(r"`(test_\w+)`", line)
        assert named and set(named) <= TESTS, line


def test_every_file_of_the_package_is_listed_once() -> None:
    listed = [name for line in rows("Who does what") for name in re.findall(r"`(\w+\.py)`", line)]
    files = {file.name for file in (ROOT / "holdfast" / "deploy").glob("*.py")} - {"__init__.py"}
    assert sorted(listed) == sorted(files)


def test_files_and_tests_named_elsewhere_on_the_pages_exist() -> None:
    for page in (PAGE, (ROOT / "docs" / "reliability.md").read_text()):
        named = re.findall(r"`((?:tests|holdfast|benchmarks)/[\w/.]+)`", page)
        assert named and all((ROOT / path).exists() for path in named), named
        assert set(re.findall(r"`(test_\w+)`", page)) <= TESTS
