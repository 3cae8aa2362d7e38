"""docs/privacy.md says what every method sends: held to the methods' own schemas."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.core.types import Schema
from holdfast.experiment.loop import Experiment
from holdfast.privacy.accounting import epsilon_of
from holdfast.privacy.protection import refused
from tests.helpers import built_in, tiny

PAGE = Path(__file__).parents[2] / "docs" / "privacy.md"
ROW = re.compile(r"^\| `([a-z0-9-]+)` \| ([^|]*) \| [^|]* \| ([^|]*)\|$", re.M)
ROWS = {
    name: (set(re.findall(r"`(\w+)`", sent)), set(re.findall(r"`(\w+)`", bare)))
    for name, sent, bare in ROW.findall(PAGE.read_text())
}


def schemas(method: str, out: Path) -> dict[str, Schema]:
    options = {"shape": [4], "classes": 3, "most": 100}
    data = {"name": "declared", "options": options, "split": {"train": 0.6, "validation": 0.2, "test": 0.2}}
    experiment = Experiment(tiny(method=method, data=data), out)
    return {
        task: experiment.rule.schema(task, experiment.run_context.wire()) for task in experiment.rule.tasks
    }


def test_every_method_is_on_the_page() -> None:
    assert set(ROWS) == set(built_in("method"))


@pytest.mark.parametrize("method", sorted(ROWS))
def test_the_page_names_what_a_method_sends_and_what_noise_does_not_protect(
    method: str, tmp_path: Path
) -> None:
    found = schemas(method, tmp_path)
    assert ROWS[method][0] == {name for schema in found.values() for name in schema}
    assert ROWS[method][1] == {name for task, schema in found.items() for name in refused(schema, task)}


def test_the_pages_figures() -> None:
    pytest.importorskip("opacus", reason="the accountant needs opacus: pip install 'holdfast[privacy]'")
    once, ten = (epsilon_of([(0.5, times)], 1e-5) for times in (1, 10))
    assert f"spends epsilon {once:.1f} in one round and {ten:.1f} in ten" in " ".join(
        PAGE.read_text().split()
    )
