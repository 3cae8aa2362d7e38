"""Draws the pictures of docs/partitions.md, each from the config before it on the page.

python benchmarks/gallery.py
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import torch

from holdfast.core.files import write_atomically
from holdfast.core.keys import Key
from holdfast.data.federation import build_federation, load_samples
from holdfast.data.samples import Samples
from holdfast.experiment.config import make_config
from holdfast.report.charts import heat_map
from holdfast.report.class_counts import Holdings

DOCS = Path(__file__).resolve().parents[1] / "docs"
_STYLE = (
    "svg{font-family:sans-serif}.cell{fill:#f1f2ef}.heat{fill:#0b5f96}.count{font-size:11.5px;text-anchor:middle;fill:#1b1f24}"
    ".bright{fill:#fff}.tick{font-size:12px;fill:#5d6670}.end{text-anchor:end}.middle{text-anchor:middle}"
)


def pictures() -> dict[str, str]:
    """Return the SVG text of every picture on the page, by its path."""
    page = (DOCS / "partitions.md").read_text()
    found = re.findall(r"```toml\n(.*?)```\n!\[[^\]]*\]\((img/[^)]+\.svg)\)", page, re.S)
    return {path: draw(config, "test" if path.endswith("-test.svg") else "train") for config, path in found}


def draw(text: str, part: str) -> str:
    """Return the heat map of a config as an SVG file, on white, so it is readable on dark pages too."""
    config = make_config(tomllib.loads(text))
    samples = load_samples(config.data)
    if config.data.partitioner().per_user:
        samples = _with_users(samples)
    federation = build_federation(config.data, Key(config.seed).fold("data"), samples)
    counts = getattr(federation, part).by_class(samples.classes).numpy()
    holdings = Holdings(config.data, federation, part, counts)
    svg = re.sub(
        r"<title>.*?</title>", "", heat_map(counts.tolist(), holdings.names)
    )  # nothing can point into a picture
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ').replace(
        "><pattern", f'><style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/><pattern', 1
    )


def _with_users(samples: Samples) -> Samples:
    """Return the digits as if written by 20 users, each with more of some digits than of others."""
    taste = Key(7).fold("taste").uniform(20, samples.classes, dtype=torch.float64) ** 4
    luck = -torch.log1p(-Key(7).fold("luck").uniform(20, len(samples), dtype=torch.float64))
    return replace(
        samples, user=(taste[:, samples.y] / luck).argmax(0)
    )  # each user writes a digit in proportion to its taste for it


def main() -> None:
    for path, text in pictures().items():
        write_atomically(DOCS / path, text.encode() + b"\n")
        print(f"{len(text):6,} bytes  docs/{path}")


if __name__ == "__main__":
    main()
