"""The documentation is executed: Python blocks run, configs parse and expand."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from holdfast.experiment.config import make_config
from holdfast.sweeps.grid import expand

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FOLLOWED = [
    ROOT / "README.md",
    DOCS / "quickstart.md",
    *DOCS.glob("tutorials/*.md"),
    *DOCS.glob("how-to/*.md"),
]
"""Pages that test_readme.py follows from top to bottom."""
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PLUGIN = "shared-body"  # a method that a page writes itself


def blocks(language: str, pages: list[Path]) -> list:
    found = []
    for page in pages:
        for place, block in enumerate(re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)):
            found.append(pytest.param(block, id=f"{page.name}-{place}"))
    return found


@pytest.mark.parametrize("block", blocks("python", [page for page in PAGES if page not in FOLLOWED]))
def test_python_blocks_run(block, tmp_path, monkeypatch, capsys, forget):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "example", "exec"), {"__name__": "example"})
    assert list((tmp_path / "runs").iterdir())  # every example is a run


@pytest.mark.parametrize("block", blocks("toml", PAGES))
def test_configs_are_valid(block):
    cells = [table for _, table in expand(tomllib.loads(block))]
    assert cells
    for table in (table for table in cells if table.get("method", {}) != {"name": PLUGIN}):
        make_config(table).parts()


def test_the_layout_in_the_design_page_names_all_packages_and_only_modules_that_exist():
    page = (ROOT / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|(.*)\|(.*)\|$", page.partition("Where to change")[0], re.M)
    listed = [name for names, _, _ in rows for name in re.findall(r"`(\w+)`", names)]
    package = ROOT / "holdfast"
    there = {p.name for p in package.iterdir() if (p / "__init__.py").exists()} | {"api"}
    assert sorted(listed) == sorted(there)
    for names, _, modules in rows:
        folder = package / re.findall(r"`(\w+)`", names)[0]
        for module in re.findall(r"`(\w+)`", modules):
            assert (folder / f"{module}.py").exists() or (folder / module).is_dir(), f"{folder.name}/{module}"


def test_files_that_pages_name_exist():
    """Paths in backticks that begin with a folder of the repository."""
    for page in (ROOT / "docs" / "design.md", ROOT / "CONTRIBUTING.md", ROOT / "README.md"):
        for path in re.findall(r"`((?:holdfast|tests|benchmarks|docs)/[\w./-]*\w/?)`", page.read_text()):
            assert (ROOT / path).exists() or path == "holdfast/attacks/zeros.py", f"{page.name}: {path}"


def test_files_that_the_table_of_changes_names_exist():
    """Its paths are those in the package."""
    page = (ROOT / "docs" / "design.md").read_text()
    table = page.partition("(paths are in `holdfast/`):")[2].partition("## ")[0]
    paths = re.findall(r"`(\w+/(?:[\w.-]+/?)*)`", table)
    assert len(paths) > 30
    for path in paths:
        assert (ROOT / "holdfast" / path).exists(), path
