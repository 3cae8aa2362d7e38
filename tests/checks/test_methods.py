"""What every registered method must keep: the plan, the company and the cohort it is trained in change
nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast import Model
from holdfast.core.registry import describe, find
from holdfast.engine.simulator import Simulator
from holdfast.methods import ClientRule
from holdfast.results.run import Run
from holdfast.sweeps.session import resume
from tests.checks.method_cases import NETWORKS, hard
from tests.helpers import OFTEN, RAGGED, assert_same, built_in, everything, methods_in_turn, run_all

METHODS = list(built_in("method"))
every_method = pytest.mark.parametrize("name", METHODS)
in_turn = pytest.mark.parametrize("name", methods_in_turn())


def real_settings(name: str) -> list[str]:
    return [s["name"] for s in describe(find("method", name))["settings"] if s["type"] == "float"]


class Baselines:
    """Runs that several tests compare with: each is made once per process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[tuple[str, str, str], Run] = {}
        self.ends: dict[tuple[str, str, str], dict[str, Tensor]] = {}

    def run(self, name: str, network: str = "mlp", plan: str = "vmap") -> Run:
        key = (name, network, plan)
        if key not in self.runs:
            table = hard(name, model=NETWORKS[network], engine={"plan": plan})
            self.runs[key] = run_all([table], self.folder / "-".join(key))[0]
        return self.runs[key]

    def end(self, name: str, network: str = "mlp", plan: str = "vmap") -> dict[str, Tensor]:
        """All numbers the run ended with."""
        key = (name, network, plan)
        if key not in self.ends:
            self.ends[key] = everything(self.run(*key))
        return self.ends[key]


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> Baselines:
    return Baselines(tmp_path_factory.mktemp("baselines"))


@pytest.mark.parametrize(
    ("name", "network"),
    [
        pytest.param(name, network, marks=() if name in OFTEN else pytest.mark.slow)
        for network in ("mlp", "cnn-bn")
        for name in METHODS
    ],
)
def test_loop_equals_vmap(name: str, network: str, baselines: Baselines) -> None:
    loop, vmap = (baselines.end(name, network, plan) for plan in ("loop", "vmap"))
    assert_same(loop, vmap, 1e-10)
    assert any(key.startswith(("server/", "rows/")) and value.numel() > 1 for key, value in loop.items())


@in_turn
@pytest.mark.parametrize("plan", ["captured-loop", "compiled-vmap"])
def test_replayed_plans_equal_loop(
    name: str, plan: str, simulate: Callable[..., Run], baselines: Baselines
) -> None:
    """On a CPU a program runs uncompiled; that its rows, masks and batches are the loop's is the same
    everywhere."""
    replayed = simulate(**hard(name, model=NETWORKS["cnn-bn"], engine={"plan": plan}))
    assert_same(baselines.end(name, "cnn-bn", "loop"), everything(replayed), 1e-10)


@every_method
def test_one_float32_step_of_both_plans(name: str, simulate: Callable[..., Run]) -> None:
    train = {"rounds": 1, "local_steps": 1, "dtype": "float32", "participation": 1.0}
    tables = (
        hard(name, model=NETWORKS["cnn-bn"], train=train, engine={"plan": plan}) for plan in ("loop", "vmap")
    )
    loop, vmap = (everything(simulate(**table)) for table in tables)
    for key in loop:
        if key.startswith(("server/", "rows/")) and loop[key].is_floating_point():
            torch.testing.assert_close(loop[key], vmap[key], rtol=0, atol=1e-5)


@in_turn
def test_fused_equals_alone(
    name: str, simulate: Callable[..., Run], simulate_all: Callable[..., list[Run]]
) -> None:
    """Cells that differ in seed, learning rate, decay, epochs, partition, participation and every real
    setting of the method."""
    tables = [
        hard(name),
        hard(name, seed=1, train={"lr": 0.03, "local_epochs": 1, "momentum": 0.0, "weight_decay": 0.1}),
        hard(
            name,
            seed=2,
            data={"clients": 3, "partition": {**RAGGED, "beta": 0.1}},
            train={"participation": 1.0, "lr_decay": 0.5},
        ),
        hard(name, data={"partition": {"name": "iid", "samples_per_client": 9}}, train={"rounds": 2}),
    ]
    for place, table in enumerate(tables):
        table["method"] |= {setting: 0.3 + 0.2 * place for setting in real_settings(name)}
    together = simulate_all(tables)
    for table, fused in zip(tables, together, strict=True):
        alone = simulate(**table)
        assert_same(everything(fused), everything(alone), 1e-10)
        assert fused.final["accuracy"] == alone.final["accuracy"]


@in_turn
def test_chunks_change_nothing(name: str, simulate: Callable[..., Run], baselines: Baselines) -> None:
    """A memory bound of a few kilobytes trains client by client."""
    tight = simulate(**hard(name, engine={"plan": "vmap", "memory": "1kB"}))
    assert tight.manifest["plan"]["rows"] == 1
    assert_same(everything(tight), baselines.end(name), 1e-10)


@in_turn
def test_the_same_run_twice_is_the_same_to_the_bit(
    name: str, simulate: Callable[..., Run], baselines: Baselines
) -> None:
    first, second = baselines.end(name), everything(simulate(**hard(name)))
    assert first.keys() == second.keys()
    for key in first:
        assert torch.equal(torch.nan_to_num(first[key]), torch.nan_to_num(second[key])), key


@in_turn
def test_a_run_that_was_cut_goes_on_to_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, baselines: Baselines
) -> None:
    """All that a server half and its clients remember is in their states."""
    honest = Simulator.exchange

    def exchange(self: Simulator, calls: Any) -> Any:
        if calls[0].run_context.round == 3:
            raise KeyboardInterrupt
        return honest(self, calls)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Simulator, "exchange", exchange)
        run_all([hard(name)], tmp_path / "cut")
    assert Run(tmp_path / "cut").round == 2
    resume(tmp_path / "cut")
    assert_same(everything(Run(tmp_path / "cut")), baselines.end(name), 0)


@in_turn
def test_another_seed_is_another_run(name: str, simulate: Callable[..., Run], baselines: Baselines) -> None:
    first, second = baselines.run(name), simulate(**hard(name, seed=1))
    assert not torch.equal(first.vector(client=0), second.vector(client=0))


POOR: dict[str, dict[str, Any]] = {
    "one client": {"data": {"clients": 1, "partition": {"name": "iid", "samples_per_client": 8}}},
    "empty rounds after the first": {"train": {"availability": {str(c): [[1, 2]] for c in range(5)}}},
    "no clients for two rounds": {"train": {"availability": {str(c): [[3, 4]] for c in range(5)}}},
    "all replies lost": {"train": {"dropout": 1.0}},
    "no epochs": {"train": {"local_epochs": 0}},
    "no full batch": {"train": {"batch_size": 50, "drop_last": True}},
    "one sample": {
        "data": {"partition": {"name": "iid", "samples_per_client": 1}, "split": {"train": 1.0, "test": 0.0}}
    },
}


@in_turn
def test_poor_rounds_are_survived(name: str, simulate_all: Callable[..., list[Run]]) -> None:
    runs = simulate_all([hard(name, **changes) for changes in POOR.values()])
    for case, run in zip(POOR, runs, strict=True):
        assert run.round in (3, 4), case  # a method may have something to do after the last round
        for key, value in everything(run).items():
            assert not key.startswith(("server/", "rows/")) or torch.isfinite(value).all(), (case, key)


@in_turn
def test_every_protocol_works(name: str, simulate_all: Callable[..., list[Run]]) -> None:
    data = {"held_out": 2, "pool": "train", "split": {"train": 0.5, "validation": 0.25, "test": 0.25}}
    protocols = [
        ("all", "finetune"),
        ("benign", "deliver"),
        ("cohort", "keep_own"),
        ("held-out", "keep_own"),
        ("held-out", "finetune"),
    ]
    asked = [{"clients": clients, "unselected": who, "test": "global"} for clients, who in protocols]
    runs = simulate_all([hard(name, data=data, evaluate=each, train={"rounds": 2}) for each in asked])
    for (clients, unselected), run in zip(protocols, runs, strict=True):
        case = (clients, unselected)
        assert 0 <= run.final["accuracy"] <= 1 and run.final["accuracy/selected"] is not None, case
        assert len(run.clients()) == {"all": 3, "benign": 3, "cohort": 2, "held-out": 2}[clients], case


@every_method
def test_exported_models_are_those_that_were_measured(name: str, baselines: Baselines) -> None:
    """run.vector(client) gives the model behind the client's accuracy, for cohort members and others."""
    run = baselines.run(name)
    frame, federation = run.clients(), run._experiment.federation
    for kind in find("method", name).models:  # type: ignore[attr-defined]
        for client in range(5):
            module = run.model(client=client, model=kind).double()
            rows, labels = federation.test.client(client)
            with torch.no_grad():
                right = (
                    (module(federation.samples.batch(rows, torch.float64)).argmax(1) == labels)
                    .double()
                    .mean()
                )
            assert float(right) == pytest.approx(
                float(frame.loc[frame.client == client, f"accuracy/{kind}"].iloc[0])
            )


class Mine(nn.Module):
    """A user's module: the head has a name of its own and comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.body, self.norm = nn.Linear(5, 10), nn.Linear(64, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.body(x.flatten(1))).tanh())


def with_a_term(net: Any, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch.x), batch.y, reduction="none") + 0.01 * net.fc.weight.norm()


@pytest.mark.parametrize(
    "name", [name for name in METHODS if find("method", name).Client.network is not ClientRule.network]
)  # type: ignore[attr-defined]
def test_a_loss_may_look_into_the_users_module(name: str, simulate: Callable[..., Run]) -> None:
    """Although the method puts something around it, and also in the first steps, which choose a plan."""
    train, model = {"loss": with_a_term, "rounds": 1, "local_steps": 1}, Model(Mine, head="fc")
    run = simulate(**hard(name, model=model, train=train, engine={"plan": "auto"}))
    assert all(
        torch.isfinite(value).all()
        for key, value in everything(run).items()
        if key.startswith(("server/", "rows/"))
    )


def test_a_mixed_group(simulate: Callable[..., Run], simulate_all: Callable[..., list[Run]]) -> None:
    """Methods with different client halves in one start, two of each: alike ones are fused, the others run
    beside them."""
    tables = [hard(name, seed=seed) for name in ("fedavg", "ditto", "local") for seed in (0, 1)]
    for table, fused in zip(tables, simulate_all(tables), strict=True):
        assert_same(everything(fused), everything(simulate(**table)), 1e-10)
