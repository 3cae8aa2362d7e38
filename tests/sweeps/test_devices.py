"""A sweep on several devices of this machine: names of devices, equal bits, and workers that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.core.errors import ConfigError
from holdfast.experiment.config import Config, make_config
from holdfast.experiment.config_tables import read_config
from holdfast.experiment.manifest import run_folders
from holdfast.experiment.runner import RunCallbacks
from holdfast.sweeps.device_processes import _environment, device_names
from holdfast.sweeps.dispatch import Limits
from holdfast.sweeps.grid import configs, expand
from holdfast.sweeps.launch import OnDevices
from holdfast.sweeps.launchers import launcher_of
from holdfast.sweeps.runner import sweep
from tests.cli.commands import HERE, Answer, refused
from tests.experiment.kills import bits, table

CONFIG = """
[data]
clients = 3
[train]
rounds = 3
local_epochs = 1
[engine]
plan = "loop"
threads = 1
workers = 1
[sweep]
"method.name" = ["fedavg", "ditto"]
seed = [0, 1]
"""


def cells_of(rounds: int = 3, **grid: Any) -> list[tuple[str, Config]]:
    given = {**table("ditto", rounds=rounds), "sweep": grid}
    return [(label, make_config(one)) for label, one in expand(given)]


@pytest.mark.parametrize(
    "text, gpus, names",
    [
        ("all", 2, ["cuda:0", "cuda:1"]),
        ("cuda:1, cuda:0", 2, ["cuda:1", "cuda:0"]),
        ("cuda", 1, ["cuda:0"]),
        ("cpu,cpu", 0, ["cpu", "cpu"]),
        ("cpu:3", 0, ["cpu", "cpu", "cpu"]),
    ],
)
def test_devices_are_named(text: str, gpus: int, names: list[str]) -> None:
    assert device_names(text, lambda: gpus) == names


@pytest.mark.parametrize(
    "text, gpus, words",
    [
        ("all", 0, "has no GPU"),
        ("cuda:2", 2, "the last one is cuda:1"),
        ("tpu", 0, "'tpu' is not a device"),
        ("cpu:0", 0, "from 1 to 512"),
        ("cpu,cuda:0", 1, "mixes CPU and GPU"),
        (" , ", 0, "name at least one"),
    ],
)
def test_wrong_devices_are_one_line(text: str, gpus: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        device_names(text, lambda: gpus)
    assert "\n" not in str(error.value)


def test_each_process_sees_only_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _environment("cuda:1") == {"CUDA_VISIBLE_DEVICES": "1"} and _environment("cpu") == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert _environment("cuda:1") == {"CUDA_VISIBLE_DEVICES": "6"}


def test_options_that_exclude_each_other_are_refused(cli: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(CONFIG)
    refused(cli("sweep", "t.toml", "--devices", "cpu:2", "--device", "cpu"), "--devices and --device")
    refused(cli("sweep", "t.toml", "--devices", "cpu:2", "--ray"), "leave one of them out")
    refused(cli("sweep", "t.toml", "--ray-interval", "5"), "belongs to ray")
    refused(cli("sweep", "--ray", "t.toml"), "this is no address")
    refused(cli("tune", "t.toml", "--budget", "2", "--devices", "tpu"), "is not a device")
    refused(cli("reproduce", "fedcom", "--scale", "smoke", "--devices", "tpu"), "is not a device")
    with pytest.raises(ConfigError, match="leave one of them out"):
        holdfast.sweep(CONFIG, seed=[0, 1], ray=True, devices="cpu:2")
    with pytest.raises(ConfigError, match="number of seconds"):
        launcher_of(ray=True, ray_interval=0.0)
    assert not (tmp_path / "runs").exists()


def test_python_objects_cannot_go_to_another_process(tmp_path: Path) -> None:
    from torch import nn

    def own(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))

    with pytest.raises(ConfigError, match="model is a Python object"):
        holdfast.sweep(model=own, seed=[0, 1], out=tmp_path / "s", devices="cpu:2", progress=False)
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_two_processes_give_the_bits_of_one_and_the_same_command_has_nothing_left_to_do(
    tmp_path: Path,
) -> None:
    cells = cells_of(**{"method.name": ["fedavg", "ditto"], "seed": [0, 1, 2]})
    sweep(cells, tmp_path / "one")
    told: list[tuple[str, int]] = []
    watch = RunCallbacks(moved=lambda experiment: told.append((experiment.label, experiment.committed)))
    statuses = sweep(cells, tmp_path / "two", watch, launcher=OnDevices("cpu,cpu"))
    assert [status.status for status in statuses] == ["finished"] * 6
    assert {(label, 3) for label, _ in cells} <= set(told), "one display follows all"
    assert len(list((tmp_path / "two" / "groups").iterdir())) == 2
    for folder in run_folders(tmp_path / "one"):
        assert bits(tmp_path / "two" / folder.name) == bits(folder)
    assert sweep(cells, tmp_path / "two", launcher=OnDevices("cpu,cpu")) == statuses


@pytest.mark.slow
def test_data_that_was_handed_over_and_not_copied_reaches_the_processes(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    data = [(draw.normal(size=(30, 6)).astype("float32"), draw.integers(0, 3, 30)) for _ in range(4)]
    about: dict[str, Any] = {
        "seed": [0, 1],
        "data": holdfast.Data(clients=data, keep="1B"),
        "train": {"rounds": 2, "local_epochs": 1},
        "engine": {"plan": "loop", "threads": 1, "workers": 1},
        "progress": False,
    }
    holdfast.sweep(out=tmp_path / "one", **about)
    found = holdfast.sweep(out=tmp_path / "two", devices="cpu:2", **about)
    assert [cell.status for cell in found] == ["finished"] * 2
    for folder in run_folders(tmp_path / "one"):
        assert bits(tmp_path / "two" / folder.name) == bits(folder)


@pytest.mark.slow
def test_a_process_that_is_killed_is_replaced_and_a_cell_that_fails_stops_no_other(tmp_path: Path) -> None:
    """One unit is killed in its second round; another holds a method that fails in every cell."""
    plugin = tmp_path / "stumbles.py"
    plugin.write_text(
        "from holdfast.core.registry import register\n"
        "from holdfast.methods import ClientRule, Method\n"
        "from holdfast.methods.averaging import Averaging\n"
        "class Stumbles(ClientRule):\n"
        "    def train(self, local, state, received, extra):\n"
        "        raise ZeroDivisionError('the client fell')\n"
        "@register('method', 'stumbles-elsewhere')\n"
        "class StumblesMethod(Method):\n"
        "    '''Fails.'''\n"
        "    Client, Server = Stumbles, Averaging\n"
    )
    holdfast.load_plugin(plugin)
    cells = cells_of(60, **{"method.name": ["ditto", "stumbles-elsewhere"], "seed": [0, 1]})
    good = [cell for cell in cells if "ditto" in cell[0]]
    sweep(good, tmp_path / "one")
    said, killed = list[str](), threading.Event()

    def say(line: str) -> None:
        said.append(line)

    def moved(experiment: Any) -> None:
        if experiment.committed >= 2 and "ditto" in experiment.label and not killed.is_set():
            killed.set()
            name = next(line for line in said if line.startswith("cpu (process"))
            pids = {int(line.split("process ")[1].split(")")[0]) for line in said if "(process" in line}
            assert name and pids
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    began = time.monotonic()
    statuses = sweep(
        cells,
        tmp_path / "two",
        RunCallbacks(say=say, moved=moved),
        launcher=OnDevices("cpu,cpu", Limits(silence=60.0)),
    )
    assert killed.is_set() and time.monotonic() - began < 60
    assert [status.status for status in statuses] == ["finished"] * 2 + ["failed"] * 2
    assert "the client fell" in str(statuses[2].reason)
    assert any("is lost (it was ended by signal 9" in line for line in said)
    for place, folder in enumerate(run_folders(tmp_path / "one")):
        assert bits(statuses[place].path) == bits(folder)


@pytest.mark.slow
def test_workers_end_with_their_parent_and_the_command_continues(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(CONFIG)
    line = [sys.executable, "-m", "holdfast.cli", "sweep", "t.toml", "--set", "train.rounds=16"]
    with subprocess.Popen(
        [*line, "--out", "s", "--devices", "cpu:2"], cwd=tmp_path, env=HERE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stderr is not None
        pids = set[int]()
        for said in parent.stderr:
            pids |= {int(said.split("process ")[1].split(")")[0])} if "(process" in said else set()
            if "rounds" in said:
                break
        parent.kill()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    done = subprocess.run(
        [*line, "--out", "s", "--json"], cwd=tmp_path, env=HERE, capture_output=True, timeout=60
    )
    assert [cell["status"] for cell in json.loads(done.stdout)["cells"]] == ["finished"] * 4
    sweep(configs(read_config(tmp_path / "t.toml", ["train.rounds=16"])), tmp_path / "one")
    for folder in run_folders(tmp_path / "one"):
        assert bits(tmp_path / "s" / folder.name) == bits(folder)
