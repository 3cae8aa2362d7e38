"""Pages are followed from top to bottom: the README with the wheel in an empty environment, tutorials and
how-to pages with this environment."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.package import ROOT, build, empty_environment, only
from tests.pages import Reader, steps

README = (ROOT / "README.md").read_text()
NOT_RUN = {
    "make demo": "creates an environment; the command behind it, `holdfast demo`, runs in tests/cli",
    "source .venv/bin/activate": "the test has an environment of its own",
    "holdfast federation up": "opens ports and runs for a while; tests/deploy/test_loopback.py runs it",
    "holdfast report runs/table --live": "serves a page until Ctrl-C; tests/report runs it",
}
DOCS = ROOT / "docs"
FOLLOWED = [
    DOCS / "quickstart.md",
    DOCS / "install.md",
    *sorted(page for page in DOCS.glob("tutorials/*.md") if page.stem != "deploy"),
    *sorted(DOCS.glob("how-to/*.md")),
]
# All pages together take minutes, so the others are followed by make test-all only.
AT_EVERY_MERGE = ("quickstart", "own-data")
NOT_RUN_IN_DOCS = {"pip install": "installs from outside"}
if not torch.cuda.is_available():
    NOT_RUN["holdfast sweep sweep.toml --device cuda"] = "there is no GPU here"


@pytest.mark.slow
def test_the_readme_works_from_top_to_bottom_in_an_empty_environment(tmp_path_factory, tmp_path):
    folder = tmp_path_factory.mktemp("readme")
    python = empty_environment(folder / "env", only(build(folder), "*.whl"))
    ran = Reader(tmp_path, python).follow(README, NOT_RUN)
    assert len(ran) > 10
    assert (tmp_path / "runs" / "table" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=() if page.stem in AT_EVERY_MERGE else pytest.mark.long)
        for page in FOLLOWED
    ],
)
def test_a_page_works_from_top_to_bottom(page, tmp_path):
    Reader(tmp_path, Path(sys.executable)).follow(page.read_text(), NOT_RUN_IN_DOCS)


@pytest.mark.slow
@pytest.mark.long
def test_the_tutorial_on_deployment_works_from_top_to_bottom(tmp_path):
    """It opens port 8443 on this machine."""
    pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")
    Reader(tmp_path, Path(sys.executable)).follow((ROOT / "docs/tutorials/deploy.md").read_text(), {})


def test_commands_of_the_readme_that_are_not_run_are_in_it():
    """A reason that no command needs any more is removed; targets of make exist."""
    commands = [step.text for step in steps(README) if step.kind == "command"]
    for beginning in NOT_RUN:
        assert any(command.startswith(beginning) for command in commands), beginning
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", "\n".join(commands), re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target
