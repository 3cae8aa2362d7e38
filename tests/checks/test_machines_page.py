"""docs/machines.md says for every registered part how it reads updates that several ranks share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.core.columns import READS, reads_of
from holdfast.core.registry import build
from holdfast.methods.base import ServerRule
from tests.helpers import built_in

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "machines.md").read_text()
ROWS = {name: line for name in READS for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")}


@pytest.mark.parametrize("kind", ["aggregator", "wrapper", "detector", "attack"])
def test_every_part_is_in_the_row_of_what_it_reads(kind: str) -> None:
    for name in built_in(kind):
        more = {"aggregator": {"f": 1}, "wrapper": {"p": 4} if name == "gas" else {}}.get(kind, {})
        least = {"knows": built_in(kind)[name].least} if kind == "attack" else {}
        part = build(kind, {"name": name, **more, **least})
        found = [reads for reads, row in ROWS.items() if f"`{name}`" in row]
        assert found == [reads_of(part)], name


def test_every_method_is_named_by_what_its_server_half_reads() -> None:
    said = {
        reads: set(re.findall(r"`([a-z0-9-]+)`", text))
        for reads, text in re.findall(r"read `(columns|rows)`: (.*?)\.", PAGE, flags=re.S)
    }
    for name, method in built_in("method").items():
        server = method.Server
        if name in ("local", "fedproto", "fedgh"):
            continue
        assert issubclass(server, ServerRule)
        assert name in said[server.reads], name
