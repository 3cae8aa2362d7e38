"""The reference has everything that the code offers."""

from __future__ import annotations

import holdfast
from holdfast.core.registry import KINDS, parts
from website import reference


def test_every_public_name_part_setting_and_command_is_in_the_reference():
    pages = reference.pages()
    for name in ("open", *holdfast.__all__):
        assert f"::: holdfast.{name}\n" in pages["reference/api.md"]
    for kind in KINDS:
        for name, part in parts(kind).items():
            if part.__module__.startswith("holdfast."):
                assert f"## {name} {{ #{name} }}" in pages[f"reference/parts/{kind}.md"]
                assert f"({kind}.md#{name})" in pages["reference/parts/index.md"]
    assert "| `rounds` | `50` | `int` | communication rounds |" in pages["reference/config.md"]
    assert "## holdfast federation init\n" in pages["reference/cli.md"]
    assert "`--set` `KEY=VALUE`" in pages["reference/cli.md"]


def test_help_becomes_markdown():
    help = "Run it.\n\nWith \\[sweep] <this>.\n\n\b\nExamples:\n  holdfast run\n  holdfast run --json"
    expected = "Run it.\n\nWith [sweep] &lt;this&gt;.\n\nExamples:"
    expected += "\n\n```console\n$ holdfast run\n$ holdfast run --json\n```"
    assert reference._help(help) == expected
