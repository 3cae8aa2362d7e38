"""The package as users get it: a wheel and a source archive, installed into an empty environment and used
outside the repository."""

from __future__ import annotations

import re
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from holdfast.core.version import __version__
from tests.package import ROOT, build, empty_environment, only, shell

CONFIG = """
[data]
clients = 4
[train]
rounds = 2
[sweep]
"method.name" = ["fedavg", "ditto"]
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("package"))


def package_files() -> set[str]:
    """All files of the package in the repository."""
    files = (
        path for path in (ROOT / "holdfast").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_versions_agree():
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", citation, re.M) == [__version__]
    for page in ("README.md", "docs/install.md"):
        named = re.findall(r"holdfast-([\d.]+)-py3", (ROOT / page).read_text())
        assert named and set(named) == {__version__}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "holdfast.core.version.__version__"
    }


def test_the_build_requirement_is_the_pinned_one():
    """`make dist` builds without isolation, with the setuptools of the environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    for requirement in project["build-system"]["requires"]:
        assert requirement in pins
        assert requirement in project["project"]["optional-dependencies"]["dev"]


@pytest.mark.slow
def test_wheel_and_source_archive_hold_all_files_of_the_package(dist):
    with zipfile.ZipFile(only(dist, "*.whl")) as wheel:
        assert package_files() <= set(wheel.namelist())
        assert {name.split("/")[0] for name in wheel.namelist()} == {
            "holdfast",
            f"holdfast-{__version__}.dist-info",
        }
        metadata = wheel.read(f"holdfast-{__version__}.dist-info/METADATA").decode()
    assert f"\nVersion: {__version__}\n" in metadata
    with tarfile.open(only(dist, "*.tar.gz")) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert package_files() <= inside
    assert {
        "README.md",
        "LICENSE",
        "CITATION.cff",
        "constraints.txt",
        "docs/config.md",
        "tests/conftest.py",
    } <= inside


@pytest.mark.slow
def test_twine_accepts_both(dist):
    pytest.importorskip("twine", reason="packages are checked by twine: pip install -e '.[dev]'")
    shell(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir(), cwd=dist)


def use(python: Path, folder: Path) -> None:
    """Everything that reads files of the package: embedded digits, studies (TOML), printed numbers (CSV),
    page templates and styles."""
    folder.mkdir()
    holdfast = python.parent / "holdfast"
    variables = {"HOLDFAST_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def answer(*words: object) -> str:
        return shell(*words, cwd=folder, **variables)

    where = answer(python, "-c", "import holdfast; print(holdfast.__file__, holdfast.__version__)").split()
    assert Path(where[0]).is_relative_to(python.parents[1]) and where[1] == __version__
    assert answer(holdfast, "--version").split() == ["holdfast", __version__]
    (folder / "sweep.toml").write_text(CONFIG)
    answer(holdfast, "sweep", "sweep.toml", "--out", "runs/two")
    answer(holdfast, "report", "runs/two")
    page = (folder / "runs" / "two" / "report.html").read_text()
    assert "ditto" in page and (ROOT / "holdfast" / "report" / "page.css").read_text().splitlines()[0] in page
    assert "fedcap" in answer(holdfast, "list", "methods")
    assert "fedcap table-1" in answer(holdfast, "reproduce")
    answer(holdfast, "reproduce", "fedcpa", "table-1", "--scale", "smoke")
    assert (folder / "reproductions" / "fedcpa" / "table-1-smoke" / "report.html").exists()
    script = (
        "import holdfast; print(holdfast.run(train={'rounds': 1}, data={'clients': 3}).final['accuracy'])"
    )
    assert 0 < float(answer(python, "-c", script).split()[-1]) <= 1


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(dist, tmp_path):
    """The wheel is installed; its dependencies are those of this environment, to save time."""
    python = empty_environment(tmp_path / "env", only(dist, "*.whl"))
    use(python, tmp_path / "elsewhere")


@pytest.mark.slow
@pytest.mark.long
def test_pip_installs_the_wheel_and_all_it_needs_into_an_empty_environment(dist, tmp_path):
    venv.create(tmp_path / "env", symlinks=True, with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
    shell(*pip, only(dist, "*.whl"), cwd=tmp_path)
    use(python, tmp_path / "elsewhere")
