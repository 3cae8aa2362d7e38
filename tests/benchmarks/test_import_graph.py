"""benchmarks/import_graph.py: the picture of the packages in docs/design.md is made from the code."""

from __future__ import annotations

import re

import pytest

from benchmarks.import_graph import ABOUT, PICTURE, imports_of, main, reduced, rows_of


def test_the_picture_of_the_packages_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["import_graph.py", "--check"])
    main()
    assert set(re.findall(r'font-weight="bold"[^>]*>([a-z_]+)<', PICTURE.read_text())) == set(ABOUT)


def test_every_package_is_below_those_that_import_it() -> None:
    imports = imports_of()
    row = {node.name: node.row for nodes in rows_of(imports) for node in nodes if node.is_package}
    assert all(row[package] < row[other] for package, others in imports.items() for other in others)


def test_an_import_that_a_longer_way_implies_is_left_out() -> None:
    assert reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}
