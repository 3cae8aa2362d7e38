"""Examples of docstrings in the reference."""

from __future__ import annotations

import pytest

pytest.importorskip("griffe", reason="the reference needs mkdocstrings: pip install -e '.[docs]'")

from website.docstring_examples import with_fences  # noqa: E402


def test_an_example_ends_at_a_blank_line():
    docstring = "What it does.\n>>> f(1)\n2\n\nMore.\n\n>>> g()"
    expected = "What it does.\n\n```pycon\n>>> f(1)\n2\n```\n\nMore.\n\n\n```pycon\n>>> g()\n```"
    assert with_fences(docstring) == expected
