"""What the sources of texts, windows, recordings and tables have in common."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.core.registry import build, describe, parts
from holdfast.data.sources.labelled import LabelledSource
from tests.data.folders import write_table


@pytest.mark.parametrize(
    "name", [name for name, source in parts("source").items() if issubclass(source, LabelledSource)]
)
def test_every_source_has_a_description(name: str) -> None:
    card = describe(parts("source")[name])
    assert card["summary"] and "Licence:" in card["text"] and all(item["help"] for item in card["settings"])


def write_small(folder: Path) -> None:
    """Rows that are a table, windows and recordings at once: two classes that differ in the mean of x."""
    rng = np.random.default_rng(0)
    label = np.repeat(np.arange(40) % 2, 10)
    x = label + 0.1 * rng.standard_normal(400)
    columns = {
        "x": x,
        "colour": ["red", "blue"] * 200,
        "label": label,
        "person": np.repeat(np.arange(4), 100),
    }
    write_table(folder / "rows" / "train.parquet", columns)
    write_table(
        folder / "lists" / "train.parquet", {"signal": x.reshape(40, 10).tolist(), "label": label[::10]}
    )


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("table", {"folder": "rows", "user": "person"}, (3,)),
        ("recordings", {"folder": "rows", "user": "person", "columns": ["x"], "length": 10}, (1, 10)),
        ("windows", {"folder": "lists", "channels": 2}, (2, 5)),
    ],
)
def test_a_network_learns_from_labelled_rows(
    tmp_path: Path, name: str, options: dict, shape: tuple[int, ...]
) -> None:
    write_small(tmp_path)
    assert build("source", {"name": name, **options}).load(tmp_path).sample_shape == shape
    run = holdfast.run(
        method="fedavg",
        model={"name": "mlp", "hidden": 8},
        data={"name": name, "dir": str(tmp_path), "options": options, "clients": 4, "partition": "iid"},
        train={"rounds": 5, "local_steps": 10, "lr": 0.2, "participation": 1.0},
        engine={"plan": "loop", "threads": 1},
        out=str(tmp_path / "run"),
    )
    assert run.final["accuracy"] > 0.9
