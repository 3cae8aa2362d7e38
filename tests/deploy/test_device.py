"""Where a node trains is its own affair: node.toml says so, and nobody else needs to know."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from holdfast.core.errors import ConfigError  # noqa: E402
from holdfast.deploy.node_worker import NodeHome  # noqa: E402
from holdfast.deploy.project import open_node  # noqa: E402
from holdfast.deploy.server_app import serve  # noqa: E402
from holdfast.storage.store import Store  # noqa: E402
from tests.deploy.local_grid import LocalGrid  # noqa: E402
from tests.deploy.worlds import node_states, private_rows, simulate, write_config  # noqa: E402


def own(folder: Path, device: str) -> NodeHome:
    (folder / "node.toml").write_text(f'device = "{device}"\n')
    return NodeHome(folder, open_node(folder))


def test_a_node_chooses_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert own(tmp_path, "cpu").device == own(tmp_path, "auto").device == torch.device("cpu")
    with pytest.raises(ConfigError, match="^node.toml: device: no CUDA device is available here; use cpu"):
        _ = own(tmp_path, "cuda").device
    with pytest.raises(ConfigError, match="^node.toml: device: 'abacus' is not a device"):
        _ = own(tmp_path, "abacus").device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert own(tmp_path, "auto").device == torch.device("cuda") and own(
        tmp_path, "cuda:1"
    ).device == torch.device("cuda:1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_node_on_a_gpu_beside_two_without(tmp_path: Path) -> None:
    """Its numbers are the simulator's but for rounding; its private state and its model lie on its disk as
    any other's."""
    config = write_config(tmp_path, "ditto")
    simulate(config, tmp_path / "sim")
    settings = {"config": str(config), "out": str(tmp_path / "fed"), "deadline": 60.0, "join": 60.0}
    grid = LocalGrid(tmp_path / "nodes", settings)
    home = tmp_path / "home"
    home.mkdir()
    own(home, "cuda")
    grid.nodes[1001].node_config["home"] = str(home)
    serve(grid, settings)
    models = []
    for out in ("sim", "fed"):
        head = Store(tmp_path / out).head()
        assert head is not None
        models.append(head[1]["server/model"])
    torch.testing.assert_close(models[1], models[0], rtol=1e-3, atol=1e-4)
    rows, states = private_rows(tmp_path / "sim"), node_states(tmp_path / "nodes", 2)
    torch.testing.assert_close(states[1], rows[1], rtol=1e-3, atol=1e-4)
    assert (next((tmp_path / "nodes").glob("node1/*/1")) / "model.safetensors").exists()
