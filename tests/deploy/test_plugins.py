"""Parts of a user's own in a federation: server and nodes each run the file that lies in their own folder,
and must have the same one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from holdfast.core.errors import ConfigError  # noqa: E402
from holdfast.core.registry import load_plugin  # noqa: E402
from holdfast.deploy.inspect import examine  # noqa: E402
from holdfast.deploy.node import federated, fingerprint  # noqa: E402
from holdfast.deploy.processes import free_port  # noqa: E402
from holdfast.deploy.project import init, open_node, open_project  # noqa: E402
from holdfast.deploy.server_app import serve  # noqa: E402
from holdfast.deploy.up import RunningFederation  # noqa: E402
from tests.deploy.local_grid import LocalGrid  # noqa: E402
from tests.deploy.worlds import assert_same_runs, simulate, write_config  # noqa: E402

PLUGIN = '''
from holdfast.core.registry import register
from holdfast.methods.fedavg import FedAvg

@register("method", "NAME")
class Mine(FedAvg):
    """My own."""
'''


@pytest.fixture
def plugin(tmp_path: Path, forget: None) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN.replace("NAME", "mine"))
    return file


def test_a_project_has_its_plugins_copied_to_every_node(plugin: Path, tmp_path: Path, roomy: None) -> None:
    experiment = write_config(tmp_path, "mine")
    with pytest.raises(ConfigError, match="unknown method 'mine'"):
        init(tmp_path / "none", 3, experiment=experiment)
    project = open_project(
        init(tmp_path / "ward", 3, port=free_port(), experiment=experiment, plugins=[plugin]).path
    )
    assert project.plugins == [project.path / "mine.py"]
    for client in range(3):
        assert open_node(project.node(client)).plugins == ("mine.py",)
        assert (project.node(client) / "mine.py").read_text() == plugin.read_text()
    assert [check for check in examine(project) if not check.good] == []
    (project.node(1) / "mine.py").write_text("# another")
    wrong = [check.said for check in examine(project) if not check.good]
    assert wrong == ["client 1: its mine.py is not the server's"]


def test_server_and_nodes_load_what_their_own_settings_name(plugin: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, "mine")
    settings = {
        "config": str(config),
        "out": str(tmp_path / "fed"),
        "deadline": 20.0,
        "join": 20.0,
        "plugins": str(plugin),
    }
    grid = LocalGrid(tmp_path / "nodes", settings)
    for client, context in enumerate(grid.nodes.values()):
        home = tmp_path / f"home{client}"
        home.mkdir()
        (home / "node.toml").write_text(f'client = {client}\nplugins = ["../mine.py"]\n')
        context.node_config["home"] = str(home)
    serve(grid, settings)
    assert_same_runs(simulate(config, tmp_path / "sim"), tmp_path / "fed", 2)


def test_another_plugin_is_another_experiment(plugin: Path, tmp_path: Path) -> None:
    load_plugin(plugin)
    config = federated(write_config(tmp_path, "mine"))
    before = fingerprint(config, "", torch.zeros(1))
    assert fingerprint(config, "", torch.zeros(1)) == before
    plugin.write_text(plugin.read_text() + "# changed\n")
    assert fingerprint(config, "", torch.zeros(1)) != before


@pytest.mark.slow
def test_a_plugin_in_real_processes(tmp_path: Path, forget: None) -> None:
    """With TLS, keys and trainers: what one machine's processes load comes from their own folders."""
    mine = tmp_path / "mine.py"
    mine.write_text(PLUGIN.replace("NAME", "mine"))
    config = write_config(tmp_path, "mine", rounds=1, clients=2)
    project = init(tmp_path / "ward", 2, port=free_port(), experiment=config, plugins=[mine])
    with RunningFederation(project, lambda line: None) as up:
        up.run(timeout=900)
    assert not up.processes.alive()
    assert_same_runs(simulate(config, tmp_path / "sim"), project.run, 1)
