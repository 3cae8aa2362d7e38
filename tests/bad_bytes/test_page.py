"""docs/bad-bytes.md names readers and tests that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "bad-bytes.md").read_text()
ROWS = [line[2:-2].split(" | ") for line in PAGE.splitlines() if re.match(r"\| (?!What is read)", line)]


def exists(name: str) -> bool:
    """Whether a dotted name is a module of holdfast, or an attribute of one."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(["holdfast", *parts[:depth]]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[depth:]:
            found = getattr(found, attribute, None)
        return found is not None
    return False


def test_every_row_of_the_page_names_readers_and_tests_that_exist() -> None:
    pytest.importorskip("flwr")
    assert len(ROWS) >= 30
    for row in ROWS:
        assert len(row) == 4, row
        assert all(map(exists, re.findall(r"`([a-z_]+(?:\.\w+)*)`", row[1]))), row
        modules = re.findall(r"\w+/test_\w+", row[-1])
        assert modules and all((TESTS / f"{module}.py").exists() for module in modules), row


def test_every_module_of_this_folder_is_on_the_page() -> None:
    for module in Path(__file__).parent.glob("test_*.py"):
        assert f"bad_bytes/{module.stem}" in PAGE
