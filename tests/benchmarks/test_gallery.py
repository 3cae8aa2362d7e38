"""The pictures of docs/partitions.md are those of the configs beside them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from benchmarks import gallery
from holdfast.core.registry import parts


def test_the_pictures_in_the_docs_are_drawn_from_the_configs_in_the_docs() -> None:
    drawn = gallery.pictures()
    assert {f"img/{file.name}" for file in (gallery.DOCS / "img").glob("partition-*")} == set(drawn)
    for path, text in drawn.items():
        kept = (gallery.DOCS / path).read_text()
        assert kept == text + "\n", f"{path} is out of date: run python benchmarks/gallery.py"
        assert len(kept) < 60_000 and ElementTree.fromstring(text).tag.endswith("svg")


def test_every_partition_has_a_section_and_a_picture() -> None:
    page, drawn = (gallery.DOCS / "partitions.md").read_text(), gallery.pictures()
    for name, part in parts("partition").items():
        if part.__module__.startswith("holdfast."):
            assert f"\n## {name}\n" in page
            # flwr draws as its partitioner does; as-given divides only what was handed over in Python
            assert name in ("flwr", "as-given") or f"img/partition-{name}.svg" in drawn
