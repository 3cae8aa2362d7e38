"""Attackers that train in their own way, remember, and train their trigger: what those of searched_trigger.py
must keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.attacks.own_training import Own
from holdfast.core.errors import RunError
from holdfast.core.types import broadcast
from holdfast.engine.client_stack import client_key
from holdfast.engine.simulator import Call, Simulator
from holdfast.engine.workers import WorkerLost
from holdfast.experiment.loop import Experiment
from holdfast.local.plan import Plan
from holdfast.results.run import Run
from holdfast.sweeps import session
from tests.attacks.searched_trigger import Away, stamped
from tests.helpers import assert_same, everything, slow_fit, tiny

SEARCHED: dict[str, Any] = {"name": "searched-trigger", "fraction": 0.4}
ONE_STEP: dict[str, Any] = {"rounds": 3, "participation": 0.8}


def table(**changes: Any) -> dict[str, Any]:
    return {"method": "ditto", "attack": SEARCHED, "train": ONE_STEP, **changes}


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., tuple[Experiment, Any]]:
    """What arrives of one request to all clients."""

    def ask(plan: str = "loop", **sections: Any) -> tuple[Experiment, Any]:
        experiment = Experiment(tiny(**sections), tmp_path / f"asked-{plan}")
        context = experiment.run_context
        context.round = 1
        context.rows.path.mkdir(parents=True, exist_ok=True)
        engine = Simulator({context.plan_key: Plan(plan)})
        model = context.wire().pack(experiment.initial)
        (up,) = engine.exchange([Call(context, broadcast("train", model, torch.arange(5)))])
        return experiment, up

    return ask


def test_what_attackers_train_is_what_plain_pytorch_trains(asked: Callable[..., Any]) -> None:
    experiment, up = asked(method="fedavg", attack={**SEARCHED, "clients": [1, 4], "fraction": 0.3})
    context, ids = experiment.run_context, torch.tensor([1, 4])
    key = client_key(context.key, 1, broadcast("train", experiment.initial, ids))
    recipe = replace(context.recipe, epochs=2, lr=0.2)
    trigger = experiment.adversary.memories.tensors["all/trigger"]
    assert float(trigger.abs().min()) > 0
    model = slow_fit(
        context.network,
        experiment.initial.expand(2, -1),
        context.federation.samples,
        context.data(ids),
        key.fold("attack", "poisoned").fold("fit"),
        recipe,
        loss=lambda net, x, y: torch.nn.functional.cross_entropy(
            net(stamped(x, trigger)), torch.full_like(y, 1)
        ),
    )
    torch.testing.assert_close(up["update"][ids], 1.5 * (model - experiment.initial))
    honest, _ = asked(method="fedavg", attack="none"), None
    others = torch.tensor([0, 2, 3])
    assert torch.equal(up["update"][others], honest[1]["update"][others])


def test_only_what_travels_is_trained_and_sent(asked: Callable[..., Any]) -> None:
    experiment, up = asked(method="fedper", attack={"name": "away", "clients": [2], "fraction": 0.3})
    wire = experiment.run_context.wire()
    assert not wire.whole
    sent = wire.pack(experiment.initial)[: wire.parameters]
    torch.testing.assert_close(up["update"][2], -sent)
    assert experiment.adversary.memories.tensors == {"2/rounds": torch.ones(())}


@pytest.mark.parametrize("method", ["fedfomo", "fedas", "apfl", "pfedme"])
def test_the_server_finds_the_model_that_the_attackers_trained(
    method: str, simulate: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an update is counted from another model than the one that was sent, or none was."""
    found: list[float] = []
    report = Own.report

    def reported(self: Own, model: Tensor) -> dict[str, Tensor]:
        fields = report(self, model)
        found.append(float((fields["update"] + self.base[:, : self.local.wire.parameters]).abs().max()))
        return fields

    monkeypatch.setattr(Own, "report", reported)
    run = simulate(method=method, attack={"name": "away", "fraction": 0.4})
    assert found and max(found) == 0
    assert run.final["accuracy"] is not None


def test_loop_equals_vmap(simulate: Callable[..., Run]) -> None:
    loop, vmap = (everything(simulate(**table(engine={"plan": plan}))) for plan in ("loop", "vmap"))
    assert "attack/all/trigger" in loop
    assert_same(loop, vmap, 1e-9)


def test_fused_equals_alone(simulate: Callable[..., Run], simulate_all: Callable[..., list[Run]]) -> None:
    tables = [
        table(),
        table(seed=3, train={**ONE_STEP, "lr": 0.3}),
        table(attack={**SEARCHED, "rate": 0.4}),
        table(attack={"name": "away", "fraction": 0.4}),
        table(attack="none"),
    ]
    for each, fused in zip(tables, simulate_all(tables), strict=True):
        assert_same(everything(fused), everything(simulate(**each)), 1e-10)


@pytest.mark.slow
def test_attacks_of_papers_fused_alone_and_on_both_plans(
    simulate: Callable[..., Run], simulate_all: Callable[..., list[Run]]
) -> None:
    attacks: list[dict[str, Any]] = [
        {"name": "constrain-and-scale", "epochs": 2, "bound": 5.0},
        {"name": "alternating", "epochs": 2},
        {"name": "neurotoxin", "radius": 1.0},
        {"name": "neurotoxin", "variant": "authors", "knows": "own"},
        {"name": "chameleon", "epochs": 2},
        {"name": "iba", "channels": 2, "share": 0.5},
    ]
    for method in ("fedavg", "fedper"):
        tables = [
            table(method=method, attack={"fraction": 0.4, **attack}, seed=seed)
            for attack in attacks
            for seed in (0, 1)
        ]
        for each, fused in zip(tables, simulate_all(tables), strict=True):
            alone = everything(simulate(**each))
            assert_same(everything(fused), alone, 1e-10)
            assert_same(everything(simulate(**{**each, "engine": {"plan": "loop"}})), alone, 1e-9)


@pytest.mark.slow
def test_workers_change_nothing(simulate: Callable[..., Run]) -> None:
    alone, shared = (
        everything(simulate(**table(engine={"plan": "loop", "workers": n, "threads": None}))) for n in (1, 2)
    )
    assert_same(alone, shared, 0.0)


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop is in the middle of a round, after attackers have remembered something of it."""
    config = tiny(**table(engine={"plan": "loop"}))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    session.start([("", config)], whole)
    performed = Simulator.performed

    def stop(self: Simulator, calls: Any) -> Any:
        if calls[0].run_context.round == 3:
            raise KeyboardInterrupt
        return performed(self, calls)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Simulator, "performed", stop)
        session.start([("", config)], cut)
    session.resume(cut)
    assert_same(everything(Run(whole, config)), everything(Run(cut, config)), 0.0)


@pytest.mark.slow
def test_an_exchange_that_failed_leaves_no_memory(
    simulate: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two experiments fail together once, and are answered one by one: with the bits of one attempt."""
    expected = everything(simulate(**table(engine={"plan": "loop"})))
    performed, failed = Simulator.performed, []

    def fail(self: Simulator, calls: Any) -> Any:
        if not failed:
            failed.append(1)
            raise WorkerLost("a worker ended")
        return performed(self, calls)

    monkeypatch.setattr(Simulator, "performed", fail)
    with pytest.warns(RuntimeWarning, match="goes on with new ones"):
        assert_same(expected, everything(simulate(**table(engine={"plan": "loop"}))), 0.0)


def test_success_is_measured_with_the_trigger_of_the_round(simulate: Callable[..., Run]) -> None:
    """By hand: the committed model on stamped test images of other classes."""
    run = simulate(**table(method="fedavg", train={"rounds": 4, "participation": 1.0, "local_epochs": 2}))
    head = run.store.head()
    assert head is not None
    trigger = head[1]["attack/all/trigger"]
    experiment, net = run._experiment, run.model().double().eval()
    federation = experiment.federation
    benign = [c for c in range(5) if c not in run.manifest["malicious"]]
    rates = []
    for client in benign:
        rows, labels = federation.test.client(client)
        x = stamped(federation.samples.batch(rows[labels != 1], torch.float64), trigger)
        if len(x):
            rates.append(float((net(x).argmax(1) == 1).double().mean()))
    assert run.final["attack/asr"] == pytest.approx(sum(rates) / len(rates)) and len(rates) > 1
    without = simulate(**table(method="fedavg", attack="none"))
    assert without.final["attack/asr"] is None


def test_rows_of_a_wrong_number_are_refused(simulate: Callable[..., Run]) -> None:
    class Short(Away):
        """Returns too few rows."""

        def poisoned(self, own: Own) -> Mapping[str, Tensor]:
            return {"update": own.model[:0]}

    with pytest.raises(RunError, match="poisoned returns 'update' with 0 rows for 1 clients"):
        simulate(attack=Short())
