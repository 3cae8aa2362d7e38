"""The documentation is executed: Python blocks run, configs parse and expand."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from holdfast.experiment.config import make_config
from holdfast.sweeps.grid import expand

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list:
    found = []
    for page in PAGES:
        for place, block in enumerate(re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)):
            found.append(pytest.param(block, id=f"{page.name}-{place}"))
    return found


@pytest.mark.parametrize("block", blocks("python"))
def test_python_blocks_run(block, tmp_path, monkeypatch, capsys, forget):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "example", "exec"), {"__name__": "example"})
    assert list((tmp_path / "runs").iterdir())  # every example is a run


@pytest.mark.parametrize("block", blocks("toml"))
def test_configs_are_valid(block):
    cells = expand(tomllib.loads(block))
    assert cells
    for _, table in cells:
        make_config(table).parts()
