"""What leaves a node that clips and adds noise, and what the accountant says of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

pytest.importorskip("opacus", reason="the accountant needs opacus: pip install 'holdfast[privacy]'")
pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from flwr.app import Message  # noqa: E402

from holdfast.core.errors import ConfigError, RunError  # noqa: E402
from holdfast.core.types import UNDEFINED, Field  # noqa: E402
from holdfast.deploy.privacy import Account, Guard  # noqa: E402
from holdfast.deploy.server_app import serve  # noqa: E402
from holdfast.privacy.accounting import epsilon_of  # noqa: E402
from holdfast.privacy.settings import PrivacySettings  # noqa: E402
from holdfast.storage.store import Store  # noqa: E402
from tests.deploy.local_grid import LocalGrid  # noqa: E402
from tests.deploy.worlds import assert_same_runs, same_bits, simulate, write_config  # noqa: E402

UPDATE = {
    "update": Field("update", (4,)),
    "buffers": Field("buffer", (0,)),
    "count": Field("count", low=0),
    "loss": Field("scalar"),
}


def guard(state: Path, cap: float = 1000.0, **settings: Any) -> Guard:
    return Guard(PrivacySettings(**settings), state, cap)


def reply() -> dict[str, torch.Tensor]:
    update = torch.tensor([[3.0, 0.0, 4.0, 0.0]])
    return {
        "update": update,
        "buffers": torch.zeros(1, 0),
        "count": torch.tensor([77.0]),
        "loss": torch.tensor([0.5]),
    }


def test_two_clients_data_are_two_clips_apart(tmp_path: Path) -> None:
    """Noise 1 with clip C against a distance of 2 C is a multiplier of one half: anything else would
    flatter."""
    guard(tmp_path, noise=1.0).protect(reply(), UPDATE, "train")
    assert Account(tmp_path).releases == [(0.5, 1)]
    assert Account(tmp_path).spent(1e-5)["epsilon/client"] == epsilon_of([(0.5, 1)], 1e-5) > 9


def test_the_account_lives_on_the_disk_and_every_release_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):  # another process each time
        sent = guard(tmp_path, noise=8.0).protect(reply(), UPDATE, "train")
    guard(tmp_path, noise=16.0).protect(reply(), UPDATE, "train")
    assert json.loads((tmp_path / "privacy.json").read_text()) == {"releases": [[4.0, 3], [8.0, 1]]}
    spent = Account(tmp_path).spent(1e-5)
    assert (
        spent["participations"] == 4
        and spent["epsilon/participation"] == epsilon_of([(8.0, 1)], 1e-5) < spent["epsilon/client"]
    )
    assert (
        sent["count"].item() == 1
        and sent["loss"].item() == 0
        and not torch.equal(sent["update"], reply()["update"])
    )
    assert f"participation 4, epsilon {spent['epsilon/participation']:.4g} alone" in capsys.readouterr().err


def test_two_replies_at_once_both_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Account.write

    def slowly(self: Account, releases: Any) -> None:
        time.sleep(0.2)
        write(self, releases)

    monkeypatch.setattr(Account, "write", slowly)
    both = [
        Thread(target=lambda: guard(tmp_path, noise=8.0).protect(reply(), UPDATE, "train")) for _ in range(2)
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert Account(tmp_path).releases == [(4.0, 2)]


def test_what_noise_does_not_protect_is_withheld_refused_or_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    features = {**UPDATE, "prototypes": Field("feature", (2, 2))}
    with pytest.raises(
        ConfigError, match="'prototypes' would be sent, and noise on updates does not protect it"
    ):
        guard(tmp_path).check(features, "train")
    with pytest.raises(ConfigError, match="'buffers' would be sent"):
        guard(tmp_path).check({**UPDATE, "buffers": Field("buffer", (3,))}, "train")
    both = {**reply(), "prototypes": torch.ones(1, 2, 2)}
    sent = guard(tmp_path, others="send").protect(both, features, "train")
    assert torch.equal(sent["prototypes"], both["prototypes"]) and sent["count"].item() == 77
    assert "not protected: count, loss, prototypes" in capsys.readouterr().err
    measured = {
        "test/total": Field("count", low=0),
        "test/global/loss": Field("score"),
        "test/global/auc": Field("score", low=UNDEFINED),
    }
    told = guard(tmp_path).protect({name: torch.tensor([9.0]) for name in measured}, measured, "evaluate")
    assert [told[name].item() for name in measured] == [0, 0, UNDEFINED]
    assert guard(tmp_path, count=50).protect(reply(), UPDATE, "train")["count"].item() == 50
    assert (
        Account(tmp_path).spent(1e-5)["participations"] == 2
    )  # an evaluation that says nothing costs nothing


def test_a_budget_ends_it_before_anything_is_sent(tmp_path: Path) -> None:
    once = epsilon_of([(5.0, 1)], 1e-5)
    limited = guard(tmp_path, noise=10.0, epsilon=once * 1.01)
    limited.protect(reply(), UPDATE, "train")
    with pytest.raises(RunError, match="privacy: the budget is spent"):
        limited.protect(reply(), UPDATE, "train")
    assert Account(tmp_path).releases == [(5.0, 1)]


def test_noise_that_the_server_would_refuse_is_reported_beforehand(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"about 1001 long and would be refused as a fault; raise train.norm_cap \(now 1000\)",
    ):
        guard(tmp_path, noise=1.0).check({"update": Field("update", (1_000_000,))}, "train")


# ---- in a federation


def federate(config: Path, out: Path, homes: Path, privacy: str, **options: Any) -> LocalGrid:
    settings = {"config": str(config), "out": str(out), "deadline": 0.2, "join": 5.0}
    grid = LocalGrid(homes, settings, **options)
    for client, context in enumerate(grid.nodes.values()):
        home = homes / f"home{client}"
        home.mkdir(parents=True, exist_ok=True)
        (home / "node.toml").write_text(f"client = {client}\n[privacy]\n{privacy}\n")
        context.node_config["home"] = str(home)
    serve(grid, settings)
    return grid


def spent(homes: Path) -> list[float]:
    return [Account(homes / f"node{client}").spent(1e-5)["participations"] for client in range(3)]


def test_a_round_that_is_played_again_counts_again(tmp_path: Path) -> None:
    class Kill(BaseException):
        pass

    def stop(request: Message, answer: Message) -> Message:
        if request.metadata.message_type == "evaluate" and request.content["header"]["round"] == 2:
            raise Kill
        return answer

    config, homes = write_config(tmp_path, "fedavg", rounds=2, train="lr = 0.1"), tmp_path / "nodes"
    privacy = 'clip = 5.0\nnoise = 0.01\nothers = "send"'
    with pytest.raises(Kill):
        federate(config, tmp_path / "fed", homes, privacy, tamper=stop)
    assert spent(homes) == [2, 2, 2]
    federate(config, tmp_path / "fed", homes, privacy, attempt=2)
    assert spent(homes) == [3, 3, 3]
    parts = Store(tmp_path / "fed").parts(2)
    assert len(parts) == 2 and parts[1]["refused"] == {} and parts[1]["metrics"]["accuracy"] > 0.2


def test_withholding_everything_else_leaves_a_federation_that_works(tmp_path: Path) -> None:
    config = write_config(tmp_path, "fedavg", rounds=1)
    federate(config, tmp_path / "fed", tmp_path / "nodes", "noise = 0.5")
    part = Store(tmp_path / "fed").parts(1)[0]
    assert (
        part["refused"] == {} and part["metrics"]["accuracy"] is None and part["metrics"]["loss/train"] == 0
    )
    assert Store(tmp_path / "fed").arrays(1)["verdict/ids"].tolist() == [0, 1, 2] and spent(
        tmp_path / "nodes"
    ) == [1, 1, 1]


def test_a_method_that_sends_more_is_refused_by_the_node(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="privacy: 'prototypes' would be sent"):
        federate(
            write_config(tmp_path, "fedproto", rounds=1), tmp_path / "fed", tmp_path / "nodes", "noise = 0.5"
        )


# ---- the simulator and a federation


@pytest.mark.parametrize("method", ["fedavg", "fedcap"])
def test_the_simulator_has_the_numbers_of_nodes_that_clip_alike(method: str, tmp_path: Path) -> None:
    """Without noise, which comes from other sources; the settings are in the nodes' node.toml, or in the
    experiment."""
    privacy = 'clip = 0.05\nnoise = 0.0\nothers = "send"'
    plain = write_config(tmp_path, method, rounds=3, train="participation = 0.67")
    private = write_config(
        tmp_path, method, 3, "private", train=f"participation = 0.67\n[privacy]\n{privacy}"
    )
    simulate(private, tmp_path / "sim")
    federate(plain, tmp_path / "fed", tmp_path / "nodes", privacy)
    for round in (1, 2, 3):
        here, there = Store(tmp_path / "sim").arrays(round), Store(tmp_path / "fed").arrays(round)
        assert same_bits({name: here[name] for name in there}, there)
    settings = {"config": str(private), "out": str(tmp_path / "both"), "deadline": 0.2, "join": 5.0}
    serve(LocalGrid(tmp_path / "others", settings), settings)
    assert_same_runs(tmp_path / "sim", tmp_path / "both", rounds=3)
    counted = Store(tmp_path / "sim").arrays(3)["privacy/releases"]
    assert [Account(tmp_path / "others" / f"node{c}").spent(1e-5)["participations"] for c in range(3)] == (
        counted.tolist()
    )


def test_settings_of_node_and_experiment_that_differ_are_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path, "fedavg", rounds=1, train="[privacy]\nnoise = 0.5")
    with pytest.raises(RunError, match=r"\[privacy\] differs from the experiment's"):
        federate(config, tmp_path / "fed", tmp_path / "nodes", "noise = 0.1")


def dp_sgd(folder: Path, noise: float, more: str = "") -> Path:
    train = "lr = 1.0\nlocal_steps = 3"
    private = f'level = "sample"\nclip = 0.1\nnoise = {noise}\nothers = "send"\n{more}'
    lines = f"{train}\n[privacy]\n{private}"
    return write_config(folder, "ditto", rounds=2, file=f"dp{noise}", train=lines)


def on_nodes(config: Path, folder: Path, name: str) -> Path:
    settings = {"config": str(config), "out": str(folder / name), "deadline": 0.2, "join": 5.0}
    serve(LocalGrid(folder / f"{name}-nodes", settings), settings)
    return folder / name


def test_dp_sgd_on_nodes_has_the_simulators_numbers_and_noise_that_the_server_does_not_know(
    tmp_path: Path,
) -> None:
    """Two models of each client are trained for a part of an epoch in two rounds: four passes are begun."""
    still, noisy = dp_sgd(tmp_path, 0.0), dp_sgd(tmp_path, 2.0)
    simulate(still, tmp_path / "still")
    assert_same_runs(tmp_path / "still", on_nodes(still, tmp_path, "fed"), rounds=2)
    simulate(noisy, tmp_path / "noisy")
    simulated, first, second = (
        Store(run).head()[1]["server/model"]  # type: ignore[index]
        for run in (tmp_path / "noisy", on_nodes(noisy, tmp_path, "one"), on_nodes(noisy, tmp_path, "two"))
    )
    assert all((a - b).abs().max() > 0.01 for a, b in [(simulated, first), (first, second)])
    assert [Account(tmp_path / "one-nodes" / f"node{c}").releases for c in range(3)] == [[(1.0, 4)]] * 3
    for run in ("noisy", "one"):
        assert Store(tmp_path / run).arrays(2)["privacy/releases"].tolist() == [4, 4, 4]


def test_poissons_assumption_is_not_for_nodes(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the server knows the order of the batches"):
        on_nodes(dp_sgd(tmp_path, 1.0, 'accounting = "poisson"'), tmp_path, "fed")
