"""The tables of parts in docs/ are what the parts declare."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.docs_tables import COLUMNS, COMPUTED, DOCS, KINDS, PAGES, table, updated
from holdfast.core.registry import Part, parts, register


@pytest.mark.parametrize("kind", PAGES)
def test_the_table_on_the_page_is_current(kind: str) -> None:
    page = (DOCS / PAGES[kind]).read_text()
    assert updated(page, kind) == page, "run python -m benchmarks.docs_tables"


@pytest.mark.parametrize("kind", [kind for kind in PAGES if kind not in KINDS])
def test_every_built_in_part_declares_the_first_column_and_no_unknown_one(kind: str) -> None:
    tables = [kind, *(table for table, of in KINDS.items() if of == kind)]
    columns = {column for table in tables for column in COLUMNS[table]} - set(COMPUTED)
    for name, cls in parts(kind).items():
        if cls.__module__.startswith("holdfast."):
            assert cls.in_docs.get(COLUMNS[kind][0]), name
            assert set(cls.in_docs) <= columns, name


def test_a_part_of_a_plug_in_is_not_in_the_table(forget: Any) -> None:
    register("wrapper", "test-not-in-docs")(type("NotInDocs", (Part,), {"__doc__": "A plug-in."}))
    assert "test-not-in-docs" in parts("wrapper") and "test-not-in-docs" not in table("wrapper")


def test_a_page_without_markers_says_which_line_is_missing() -> None:
    with pytest.raises(SystemExit, match="docs/wrappers.md has no line '<!-- table of parts: wrapper -->'"):
        updated("# Wrappers\n", "wrapper")
