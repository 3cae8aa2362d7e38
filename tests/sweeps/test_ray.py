"""Sweeps on Ray: a node is killed, the driver is killed, data and plug-ins travel, nothing listens beyond
loopback, and the core does without Ray."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import ConfigError, RunError
from holdfast.experiment.config import make_config
from holdfast.experiment.config_tables import read_config
from holdfast.experiment.manifest import run_folders
from holdfast.sweeps import ray_executor, ray_task
from holdfast.sweeps.grid import configs, expand
from holdfast.sweeps.ray_executor import connected
from holdfast.sweeps.runner import sweep
from tests.cli.commands import HERE, Answer, refused
from tests.experiment.kills import bits, table

CONFIG = """
[data]
clients = 3
[train]
rounds = 30
local_epochs = 1
[engine]
plan = "loop"
threads = 1
workers = 1
[sweep]
"method.name" = ["fedavg", "ditto"]
seed = [0, 1]
"""


def case(name: str, out: Path, seconds: float) -> dict[str, Any]:
    line = [sys.executable, "-m", "tests.sweeps.ray_case", name, str(out)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(line, env=HERE, cwd=root, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def same(out: Path, whole: Path) -> None:
    """All that runs say and hold; where private rows lie in their file may differ."""
    assert len(run_folders(whole)) == len(run_folders(out)) > 0
    for folder in run_folders(whole):
        mine, theirs = bits(out / folder.name), bits(folder)
        for one in (mine, theirs):
            one.pop("state/rows/index")
        assert mine == theirs, folder.name


@pytest.mark.slow
def test_the_core_does_not_import_ray() -> None:
    code = (
        "import sys, holdfast, holdfast.api, holdfast.cli, holdfast.sweeps.launchers;"
        " sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=HERE, timeout=60).returncode == 0


@pytest.mark.parametrize(
    "address, words",
    [
        ("127.0.0.1:9", "nothing answers at 127.0.0.1:9"),
        ("somewhere", "is not an address"),
        ("127.0.0.1:port", "is not an address"),
        ("ray://127.0.0.1:10001", "address of Ray Client"),
    ],
)
def test_a_wrong_address_is_one_line(address: str, words: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=words) as error, connected(address):
        pass
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_something_else_than_ray_at_an_address_is_noticed_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(ray_executor, "_HEALTH", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(ConfigError, match="is no Ray cluster, or not well"):
            with connected(f"127.0.0.1:{server.getsockname()[1]}"):
                pass


def test_ray_that_is_not_installed_is_one_line(
    cli: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "t.toml").write_text(CONFIG)
    refused(
        cli("sweep", "t.toml", "--out", "s", "--ray"), "Ray is not installed; pip install 'holdfast[ray]'"
    )
    assert not (tmp_path / "s").exists()


def test_a_plug_in_that_was_altered_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="altered on its way"):
        ray_task.write_plugin(("mine.py", "0" * 64, b"x = 1"), tmp_path)
    assert not list(tmp_path.rglob("*.py"))


def test_a_worker_with_another_version_is_refused() -> None:
    with pytest.raises(RunError, match="install the same"):
        ray_task.check_versions("0.0.1")


@pytest.mark.slow
def test_nothing_of_a_cluster_that_is_started_here_listens_beyond_loopback(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    found = case("ports", tmp_path, 60)
    assert set(found["open"]) == {"127.0.0.1"} and len(found["open"]) >= 4


@pytest.mark.slow
def test_a_node_is_killed_and_the_sweep_ends_with_the_bits_of_one_machine(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    found = case("node", tmp_path / "ray", 170)
    assert found["status"] == ["finished"] * 12
    assert found["killed"] and found["killed"][0] < 24, "it was killed in the middle of a unit"
    assert set(found["open"]) == {"127.0.0.1"}
    lost = [line for line in found["said"] if "is lost" in line]
    assert len(lost) == 1 and "go on elsewhere from the last round" in lost[0]
    from tests.sweeps.ray_case import ROUNDS

    grid = {"method.name": ["fedavg", "ditto", "fedper", "lg-fedavg"], "seed": [0, 1, 2]}
    cells = expand({**table("ditto", rounds=ROUNDS), "sweep": grid})
    sweep([(label, make_config(one)) for label, one in cells], tmp_path / "one")
    same(tmp_path / "ray", tmp_path / "one")


@pytest.mark.slow
def test_data_and_plug_ins_travel_to_workers_that_have_neither(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    found = case("samples", tmp_path / "out", 120)
    assert found["status"] == ["finished"] * 4
    assert found["plugins"] == [str(tmp_path / "mine.py")]
    same(tmp_path / "out" / "ray", tmp_path / "out" / "one")


@pytest.mark.slow
def test_the_driver_is_killed_and_the_command_continues(tmp_path: Path) -> None:
    """The local cluster ends with the driver. What came back is continued here, without Ray."""
    pytest.importorskip("ray")
    (tmp_path / "t.toml").write_text(CONFIG)
    line = [sys.executable, "-m", "holdfast.cli", "sweep", "t.toml", "--out", "s"]
    with subprocess.Popen([*line, "--ray", "--ray-interval", "0.2"], cwd=tmp_path, env=HERE) as driver:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not list((tmp_path / "s").glob("*/parts/000003.json")):
            time.sleep(0.05)
        driver.kill()
    cells = configs(read_config(tmp_path / "t.toml", []))
    statuses = [status.status for status in sweep(cells, tmp_path / "s")]
    assert statuses == ["finished"] * 4
    sweep(cells, tmp_path / "one")
    same(tmp_path / "s", tmp_path / "one")
