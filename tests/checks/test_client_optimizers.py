"""Whatever the clients' optimiser is: a cell of a sweep equals its run alone, plans agree, a state that is
kept goes on where it was, and a run that was cut goes on to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast.core.registry import find
from holdfast.engine.simulator import Simulator
from holdfast.local.batch_order import schedule as batches_of
from holdfast.results.run import Run
from holdfast.sweeps.session import resume
from tests.helpers import assert_same, built_in, everything, methods_in_turn, run_all

One = Callable[..., Run]
All = Callable[..., list[Run]]
ADAM = {"name": "adam", "persist": True}
VALIDATED = {"data": {"split": {"train": 0.5, "validation": 0.25, "test": 0.25}}}
# a bias under BatchNorm has a gradient of 0: with the usual eps Adam would make steps of its rounding errors
EPS = {"fedbn": 1e-3}


def cells() -> dict[str, list[dict[str, Any]]]:
    """Experiments that differ in one setting each."""
    adam, rmsprop = {"optimizer": "adam"}, {"optimizer": "rmsprop"}
    out = {
        "lr": [{**adam, "train": {"lr": lr}} for lr in (0.001, 0.02, 0.1)],
        "clip": [{**adam, "train": {"clip_gradient": most}} for most in (None, 0.01, 0.1)],
        "momentum": [
            {**rmsprop, "train": {"lr": 0.01, "momentum": m, "weight_decay": m}} for m in (0.0, 0.5)
        ],
        "kept momentum": [
            {"optimizer": {"name": "sgd", "persist": True}, "train": {"momentum": m}} for m in (0.2, 0.9)
        ],
        "some keep": [{"optimizer": {"name": "adam", "persist": kept}} for kept in (False, True)],
        "torch": [{"optimizer": "torch:NAdam", "train": {"lr": lr}} for lr in (0.001, 0.02)],
        "schedule": [
            {**adam, "schedule": given}
            for given in (
                None,
                "cosine",
                {"name": "cosine", "over": "steps"},
                {"name": "step", "every": 1, "over": "steps"},
                lambda round: 1 / round**2,
                lambda round, step: 1 / (round * step),
            )
        ],
    }
    for name in built_in("optimizer"):
        usual = {field: value.get_default() for field, value in find("optimizer", name).model_fields.items()}
        changed = [{"name": name}] + [
            {"name": name, field: _other(value)} for field, value in usual.items() if field != "persist"
        ]
        momentum = 0.5 if name in ("sgd", "rmsprop") else 0.0
        out[name] = [{"optimizer": one, "train": {"momentum": momentum}} for one in changed]
    return out


def _other(value: Any) -> Any:
    if isinstance(value, tuple):
        return (0.5, 0.6)
    return not value if isinstance(value, bool) else 0.5


@pytest.mark.parametrize("name", cells())
def test_a_sweep_gives_each_cell_its_own_run(name: str, simulate: One, simulate_all: All) -> None:
    tables = [
        {**table, "train": {"rounds": 2, "lr": 0.02, "participation": 0.8, **table.get("train", {})}}
        for table in cells()[name]
    ]
    together = simulate_all(tables)
    models = []
    for table, fused in zip(tables, together, strict=True):
        assert_same(everything(fused), everything(simulate(**table)), 1e-10)
        models.append(fused.vector())
    for i, one in enumerate(models):
        assert not any(torch.allclose(one, other, rtol=0, atol=1e-9) for other in models[:i]), "no effect"


@pytest.mark.parametrize("name", methods_in_turn())
def test_plans_agree_and_a_cut_run_goes_on_to_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Adam's state kept from round to round. pFedMe refuses it, and has a schedule all the same."""
    table: dict[str, Any] = {"method": name, "train": {"rounds": 3, "lr": 0.01, "participation": 0.7}}
    table |= {"schedule": {"name": "cosine", "over": "steps"}}
    if name != "pfedme":
        table["optimizer"] = {**ADAM, "eps": EPS.get(name, 1e-8)}
    if name == "fedfomo":
        table |= VALIDATED
    whole = {}
    for plan in ("loop", "vmap", "captured-vmap"):
        run = run_all([{**table, "engine": {"plan": plan, "threads": 1}}], tmp_path / plan)[0]
        whole[plan] = everything(run)
        assert_same(whole[plan], whole["loop"], 1e-10)
    kept = [key for key in whole["vmap"] if key.startswith("rows/optimizer/")]
    assert bool(kept) == (name != "pfedme")
    honest = Simulator.exchange

    def exchange(self: Simulator, calls: Any) -> Any:
        if calls[0].run_context.round == 3:
            raise KeyboardInterrupt
        return honest(self, calls)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Simulator, "exchange", exchange)
        run_all([table], tmp_path / "cut")
    resume(tmp_path / "cut")
    assert_same(everything(Run(tmp_path / "cut")), whole["vmap"], 0)


def test_a_kept_state_is_that_of_one_adam_for_all_rounds(simulate: One) -> None:
    """Each client by itself: a plain PyTorch loop with one torch.optim.Adam for both rounds, and one for
    each."""
    train = {"rounds": 2, "lr": 0.01}
    for persist in (True, False):
        run = simulate(
            method="local",
            optimizer={"name": "adam", "persist": persist},
            train=train,
            engine={"plan": "loop"},
        )
        for client in (0, 3):
            torch.testing.assert_close(
                run.vector(client=client), _by_hand(run, client, persist), rtol=0, atol=1e-10
            )
    assert not torch.allclose(_by_hand(run, 0, True), _by_hand(run, 0, False))


def _by_hand(run: Run, client: int, keep: bool) -> Tensor:
    experiment = run._experiment
    network, samples = experiment.network, experiment.federation.samples
    net = network.load(experiment.initial).double().train()
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    data = experiment.federation.train.take(torch.tensor([client]))
    for round in (1, 2):
        if not keep:
            optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
        key = experiment.key.fold("client", round, 0).fold(torch.tensor([client])).fold("fit")
        order = batches_of(key, data.count.numpy(), 5, torch.tensor([1]).numpy())
        for t in range(int(order.steps[0])):
            place = order.index[t, 0][order.index[t, 0] >= 0]
            x, y = samples.batch(data.rows[0, place], dtype=torch.float64), data.labels[0, place]
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimiser.step()
    named = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    return network.layout.flatten({k: v.detach() for k, v in named.items()}, torch.float64)


def test_a_state_is_not_mixed_between_two_models_of_a_client(simulate: One) -> None:
    """Ditto's common model does not depend on its private one, whatever optimiser they have."""
    common = [
        simulate(method={"name": "ditto", "lam": lam}, optimizer=ADAM, train={"rounds": 3, "lr": 0.01})
        for lam in (0.0, 5.0)
    ]
    alone = simulate(method="fedavg", optimizer=ADAM, train={"rounds": 3, "lr": 0.01})
    for run in common:
        torch.testing.assert_close(run.vector(), alone.vector(), rtol=0, atol=1e-10)
    assert not torch.allclose(common[0].vector(client=0), common[1].vector(client=0))


def test_a_kept_state_changes_no_figure_but_by_training(simulate: One) -> None:
    """A client without private state of its method has some of its optimiser: evaluation does not see it."""
    usual = {"method": "fedavg", "train": {"rounds": 1, "lr": 0.01}}
    kept, fresh = simulate(**usual, optimizer=ADAM), simulate(**usual, optimizer="adam")
    assert torch.equal(kept.vector(), fresh.vector()) and kept.final["accuracy"] == fresh.final["accuracy"]


def test_a_users_method_names_trainings_that_it_did_not_declare(simulate: One, forget: None) -> None:
    from holdfast.methods.averaging import Averaging
    from holdfast.methods.base import ClientRule, Method

    class Two(ClientRule):
        def train(self, local: Any, state: Any, received: Any, extra: Any) -> Any:
            fitted = local.fit(local.fit(received.model, purpose="first").model)
            return {}, local.report(fitted.model, received, fitted)

    @holdfast.register("method", "two-fits")
    class TwoFits(Method):
        """Trains twice."""

        Client = Two
        Server = Averaging

    with pytest.raises(holdfast.core.errors.RunError, match="does not declare its training 'train/first'"):
        simulate(method="two-fits", optimizer=ADAM, train={"lr": 0.01})
    simulate(method="two-fits", optimizer="adam", train={"lr": 0.01})
    Two.trainings = lambda self: {"train/first": 1, "train/fit": 1}  # type: ignore[method-assign]
    run = simulate(method="two-fits", optimizer=ADAM, train={"lr": 0.01})
    assert "rows/optimizer/train/first/step" in everything(run)


def test_groups_stay_as_they_are_from_round_to_round(simulate: One) -> None:
    """`holdfast plan` measures by group. A class of torch has one learning rate, which a schedule changes."""
    for given in ("adam", "torch:NAdam"):
        context = simulate(optimizer=given, schedule="cosine")._experiment.run_context
        groups = set()
        for context.round in (1, 2):
            groups.add(context.group("train"))
        assert len(groups) == 1


def test_the_servers_own_training_starts_afresh(simulate: One) -> None:
    """FLTrust trains on the server's samples, as a client without a number."""
    run = simulate(
        optimizer=ADAM,
        aggregator="fltrust",
        data={"clients": 4, "root": 8},
        train={"rounds": 2, "lr": 0.01},
        engine={"plan": "loop"},
    )
    rows = everything(run)
    assert rows["rows/ids"].tolist() == [-1, 0, 1, 2, 3]
    assert rows["rows/optimizer/train/fit/step"][0, 0] * 2 == rows["rows/optimizer/train/fit/step"][0, 0] + 2
