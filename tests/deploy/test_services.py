"""Units for systemd and the folder of an image, as `init` writes them. No container runtime is needed: what
the Containerfile copies and runs is checked one by one."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from holdfast.cli.federation import federation  # noqa: E402
from holdfast.core.version import __version__  # noqa: E402
from holdfast.deploy.processes import free_port  # noqa: E402
from holdfast.deploy.project import Project, enrol, init  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return init(tmp_path_factory.mktemp("made") / "Ward 7", 1, port=free_port(), systemd=True, container=True)


def units(project: Project) -> list[Path]:
    return [
        project.path / "systemd" / "holdfast-ward-7.service",
        project.node(0) / "holdfast-ward-7-node0.service",
    ]


def test_units_are_hardened_and_start_commands_that_exist(project: Project) -> None:
    import typer.main

    commands = typer.main.get_command(federation).commands  # type: ignore[attr-defined]
    for unit in units(project):
        parsed = configparser.RawConfigParser(strict=False)
        parsed.optionxform = str  # type: ignore[assignment, method-assign]
        parsed.read(unit)
        service = dict(parsed["Service"])
        assert service["NoNewPrivileges"] == service["PrivateTmp"] == service["ProtectHome"] == "yes"
        assert service["ProtectSystem"] == "strict" and service["CapabilityBoundingSet"] == ""
        assert service["User"].startswith("holdfast") and service["Restart"] == "on-failure"
        assert service["ReadWritePaths"] == service["WorkingDirectory"] and "MemoryMax" in service
        words = service["ExecStart"].split()
        assert words[:2] == ["/opt/holdfast/bin/holdfast", "federation"] and words[2] in commands
        assert words[3] == service["WorkingDirectory"].rstrip("/")
        left = re.findall(r"\b(NAME|USER|HOME(?!=)|WHAT|UNIT|PLACE|COMMAND|VERSION)\b", unit.read_text())
        assert left == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units(project: Project, tmp_path: Path) -> None:
    for unit in units(project):
        here = tmp_path / unit.name
        here.write_text(unit.read_text().replace("/opt/holdfast/bin/holdfast", sys.executable))
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(here)], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0 and unit.name not in done.stderr, done.stderr


def test_clients_that_are_enrolled_later_have_a_unit_too(project: Project, tmp_path: Path) -> None:
    enrol(project, 1)
    assert (project.node(1) / "holdfast-ward-7-node1.service").exists()
    plain = init(tmp_path / "plain", 1, port=free_port())
    assert list(plain.path.rglob("*.service")) == [] and not (plain.path / "container").exists()


def instructions(file: Path) -> dict[str, list[str]]:
    """The instructions of a Containerfile by their names."""
    text = re.sub(r"\\\n", " ", "\n".join(line for line in file.read_text().splitlines() if line[:1] != "#"))
    out: dict[str, list[str]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        out.setdefault(name, []).append(" ".join(rest.split()))
    return out


def test_the_containerfile_copies_what_is_there_and_runs_as_an_ordinary_user(project: Project) -> None:
    folder = project.path / "container"
    asked = instructions(folder / "Containerfile")
    assert set(asked) <= {"FROM", "ENV", "RUN", "COPY", "WORKDIR", "USER", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim", asked["FROM"][0]) and len(asked["FROM"]) == 1
    for line in asked["COPY"]:
        *sources, target = line.split()
        assert all((folder / source).exists() for source in sources) and target == "/build/"
        for named in re.findall(r"/build/(\S+)", " ".join(asked["RUN"])):
            assert named in sources
    assert asked["USER"] == ["10001:10001"] and asked["ENTRYPOINT"] == ['["holdfast"]']
    pins = (folder / "requirements.txt").read_text().splitlines()
    assert pins and all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", pin) for pin in pins)
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[^\w.-]", need)[0].replace("_", "-") for need in needed["dependencies"]}
    assert wanted | {"flwr"} <= {pin.partition("==")[0] for pin in pins}


def test_the_wheel_is_holdfast_as_it_is_installed(project: Project, tmp_path: Path) -> None:
    """Unpacked, it runs without this repository, and has all its data."""
    (wheel,) = (project.path / "container").glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        packed.extractall(tmp_path)
    info = f"holdfast-{__version__}.dist-info"
    assert {"holdfast/report/page.css", "holdfast/deploy/templates/Containerfile", f"{info}/RECORD"} <= set(
        names
    )
    assert not any("__pycache__" in name for name in names)
    record = (tmp_path / info / "RECORD").read_text().splitlines()
    assert len(record) == len(names) and record[-1] == f"{info}/RECORD,,"
    code = "import holdfast, importlib.metadata as m; print(holdfast.__file__, m.version('holdfast'))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == [str(tmp_path / "holdfast" / "__init__.py"), __version__], done.stderr
