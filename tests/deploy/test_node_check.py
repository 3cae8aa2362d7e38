"""`holdfast federation check-node` and `privacy`, from a node's folder alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from typer.testing import CliRunner  # noqa: E402

from holdfast.cli.federation import federation  # noqa: E402
from holdfast.core.errors import ConfigError  # noqa: E402
from holdfast.core.toml import to_toml  # noqa: E402
from holdfast.deploy.keys import make_node_key  # noqa: E402
from holdfast.deploy.node_check import examine_node  # noqa: E402
from holdfast.deploy.privacy import Account  # noqa: E402
from holdfast.deploy.processes import free_port  # noqa: E402
from holdfast.deploy.project import NodeSettings, init, open_node  # noqa: E402
from holdfast.privacy.accounting import epsilon_of  # noqa: E402

EXPERIMENT = """
[data]
name = "declared"
clients = 3
options = { shape = [2], classes = 2, class_names = ["no", "yes"], most = 100 }
[method]
name = "fedavg"
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    (tmp_path / "node.toml").write_text('client = 1\nfunction = "mine.py:load"\n')
    (tmp_path / "mine.py").write_text(
        "import numpy as np\ndef load(): return np.ones((8, 2)), np.array([0, 1] * 4)\n"
    )
    public = make_node_key(tmp_path, "client-1")
    for name in ("ca.pem", "server.pub"):
        (tmp_path / name).write_text(public)
    return tmp_path


def said(home: Path) -> dict[str, tuple[bool, str]]:
    return {check.what: (check.good, check.said) for check in examine_node(home)}


def test_a_node_that_is_ready(home: Path) -> None:
    checks = said(home)
    assert list(checks) == ["key", "server", "experiment", "device", "data"] and all(
        good for good, _ in checks.values()
    )
    assert checks["data"][1].startswith(
        "its own: 6 train, 0 validation, 2 test, of shape [2]; for training no "
    )
    assert CliRunner().invoke(federation, ["check-node", str(home)], standalone_mode=False).return_value == 0


def test_each_fault_is_reported_by_its_own_check(home: Path) -> None:
    (home / "mine.py").write_text(
        "import numpy as np\ndef load(): return np.ones((8, 3)), np.array([0, 1] * 4)\n"
    )
    (home / "key").chmod(0o644)
    checks = said(home)
    assert not checks["key"][0] and "chmod 600" in checks["key"][1]
    assert checks["data"] == (False, f"{home}/mine.py:load: samples have shape [3], but [2] is declared")
    (home / "node.toml").write_text('client = 1\ndata = "a"\nfunction = "mine.py:load"\n')
    assert said(home)["data"][1].endswith("remove one of them")
    (home / "node.toml").write_text('client = 3\ndtaa = "a"\n')
    assert not said(home)["node"][0] and "dtaa" in said(home)["node"][1]


def test_the_nodes_privacy_as_a_number(home: Path) -> None:
    pytest.importorskip("opacus", reason="the accountant needs opacus: pip install 'holdfast[privacy]'")
    with pytest.raises(ConfigError, match=r"neither node.toml nor the experiment has"):
        CliRunner().invoke(federation, ["privacy", str(home)], standalone_mode=False, catch_exceptions=False)
    (home / "node.toml").write_text((home / "node.toml").read_text() + "[privacy]\nnoise = 8.0\n")
    Account(home / "state").write([(4.0, 3)])
    shown = CliRunner().invoke(
        federation, ["privacy", str(home)], standalone_mode=False, catch_exceptions=False
    )
    assert float(shown.stdout) == pytest.approx(epsilon_of([(4.0, 3)], 1e-5), rel=1e-5)
    assert said(home)["privacy"] == (
        True,
        f"clip 1, noise 8; 3 participations so far, epsilon {float(shown.stdout):.4g} at delta 1e-05",
    )


def test_a_method_that_sends_more_than_updates_is_seen_before_round_1(home: Path) -> None:
    pytest.importorskip("opacus", reason="the accountant needs opacus: pip install 'holdfast[privacy]'")
    (home / "node.toml").write_text((home / "node.toml").read_text() + "[privacy]\n")
    (home / "experiment.toml").write_text(EXPERIMENT.replace("fedavg", "fedgc"))
    good, why = said(home)["privacy"]
    assert not good and why.startswith("privacy: 'held' would be sent")
    (home / "experiment.toml").write_text(EXPERIMENT.replace("classes = 2", "classes = 3"))
    assert said(home)["node"] == (False, "data.options.class_names: expected 3 different names, not 2")


def test_a_node_toml_that_init_writes_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(to_toml(NodeSettings(client=2).model_dump()))
    assert open_node(tmp_path) == NodeSettings(client=2) and open_node(tmp_path).privacy is None


def test_a_published_head_is_checked_on_a_node(
    tmp_path: Path, ask: Callable[..., tuple[int, str, str]]
) -> None:
    """By the server's key, and against the ledger that the node was shown itself."""
    project = init(tmp_path / "ward", 2, port=free_port())
    published, node = tmp_path / "ward.head", project.node(0)
    assert ask("head", project.path, "--publish", published)[0] == 0
    assert json.loads(ask("head", project.path)[1]) == json.loads(published.read_text())
    code, out, _ = ask("check-head", published, node)
    assert code == 0 and "has not been shown a ledger yet" in out
    (node / "state").mkdir()
    shutil.copy(published, node / "state" / "ledger.head")
    code, out, _ = ask("check-head", published, node)
    assert code == 0 and "it was the same" in out
    content = json.loads(published.read_text())
    (node / "state" / "ledger.head").write_text(json.dumps({**content, "head": "0" * 64}))
    code, out, _ = ask("check-head", published, node)
    assert code == 1 and "the server shows different ledgers" in out
    published.write_text(json.dumps({**content, "entries": content["entries"] + 1}))
    assert "not signed by this node's server" in ask("check-head", published, node)[1]
    assert ask("check-head", tmp_path / "none", node)[0] == 1
    (node / "state" / "server.json").write_text(json.dumps({"lost": "refused: the server lost rounds"}))
    assert "BAD  server       refused: the server lost rounds" in ask("check-node", node)[1]
