"""Whole runs against the papers' algorithms, written out slowly with nn.Module and torch.optim.SGD; and what
they reduce to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Reduced
from holdfast.aggregators.mean import Mean
from holdfast.core.keys import Key
from holdfast.core.screening import FEDERATION_NORM_CAP
from holdfast.core.types import State
from holdfast.local.fit import Recipe
from holdfast.results.run import Run
from holdfast.wrappers.clip import Clip
from tests.helpers import assert_same, everything, slow_fit
from tests.methods.slow_client import EPOCHS, ROUNDS, Slowly

SETTINGS: dict[str, Any] = {
    "train": {"rounds": ROUNDS, "local_epochs": EPOCHS, "participation": 0.6, "lr_decay": 0.8}
}


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("name", "mu"), [("fedavg", None), ("fedprox", 0.7)])
def test_fedavg_and_fedprox(name: str, mu: float | None, simulate: Callable[..., Run]) -> None:
    run = simulate(method={"name": name} | ({} if mu is None else {"mu": mu}), **SETTINGS)
    slow = Slowly(run)
    w = slow.w0
    for round, cohort in enumerate(slow.cohorts, 1):
        w = slow.mean({c: slow.train(w, c, round, None if mu is None else (w, mu)) for c in cohort})
    close(run.vector(), w)


def test_fedavg_ft(simulate: Callable[..., Run]) -> None:
    run = simulate(method="fedavg-ft", **SETTINGS)
    slow = Slowly(run)
    w, own = slow.w0, {}
    for round, cohort in enumerate(slow.cohorts, 1):
        trained = {c: slow.train(w, c, round) for c in cohort}
        own |= trained
        w = slow.mean(trained)
    close(run.vector(), w)
    for client in range(5):
        close(run.vector(client), own.get(client, w))


def test_ditto(simulate: Callable[..., Run]) -> None:
    run = simulate(method={"name": "ditto", "lam": 0.7}, **SETTINGS)
    slow = Slowly(run)
    w, v = slow.w0, {c: slow.w0 for c in range(5)}
    for round, cohort in enumerate(slow.cohorts, 1):
        v |= {c: slow.train(v[c], c, round, (w, 0.7)) for c in cohort}
        w = slow.mean({c: slow.train(w, c, round) for c in cohort})
    close(run.vector(), w)
    for client in range(5):
        close(run.vector(client), v[client])


@pytest.mark.parametrize("everyone", [False, True])
def test_local(everyone: bool, simulate: Callable[..., Run]) -> None:
    run = simulate(method={"name": "local", "everyone": everyone}, **SETTINGS)
    slow = Slowly(run)
    own = {c: slow.w0 for c in range(5)}
    for round, cohort in enumerate(slow.cohorts, 1):
        own |= {c: slow.train(own[c], c, round) for c in (range(5) if everyone else cohort)}
    for client in range(5):
        close(run.vector(client), own[client])


# ---- special cases


def test_without_pull_fedprox_is_fedavg(simulate: Callable[..., Run]) -> None:
    prox, avg = (
        everything(simulate(method={"name": "fedprox", "mu": 0.0}, **SETTINGS)),
        everything(simulate(method="fedavg", **SETTINGS)),
    )
    assert_same(prox, avg, 1e-12)


def test_without_pull_dittos_private_models_are_those_of_local_training(simulate: Callable[..., Run]) -> None:
    ditto, local = (
        everything(simulate(method={"name": "ditto", "lam": 0.0}, **SETTINGS)),
        everything(simulate(method="local", **SETTINGS)),
    )
    torch.testing.assert_close(ditto["rows/personal"], local["rows/own"], rtol=0, atol=1e-12)
    avg = everything(simulate(method="fedavg", **SETTINGS))
    torch.testing.assert_close(ditto["server/model"], avg["server/model"], rtol=0, atol=1e-12)


def test_fine_tuning_does_not_change_the_global_model(simulate: Callable[..., Run]) -> None:
    tuned, plain = (
        everything(simulate(method="fedavg-ft", **SETTINGS)),
        everything(simulate(method="fedavg", **SETTINGS)),
    )
    torch.testing.assert_close(tuned["server/model"], plain["server/model"], rtol=0, atol=1e-12)


def test_uniform_weights(simulate: Callable[..., Run]) -> None:
    run = simulate(method="fedavg", aggregator={"name": "mean", "weights": "uniform"}, **SETTINGS)
    slow = Slowly(run)
    w = slow.w0
    for round, cohort in enumerate(slow.cohorts, 1):
        w = torch.stack([slow.train(w, c, round) for c in cohort]).mean(0)
    close(run.vector(), w)
    assert run.store.arrays(ROUNDS)["verdict/weights"].tolist() == pytest.approx([1 / 3] * 3)


def test_server_learning_rate(simulate: Callable[..., Run]) -> None:
    run = simulate(method="fedavg", train=SETTINGS["train"] | {"server_lr": 0.25})
    slow = Slowly(run)
    w = slow.w0
    for round, cohort in enumerate(slow.cohorts, 1):
        w = 0.75 * w + 0.25 * slow.mean({c: slow.train(w, c, round) for c in cohort})
    close(run.vector(), w)


# ---- traffic


def test_bytes(simulate: Callable[..., Run]) -> None:
    """3 of 5 clients for 3 rounds; a model of d float64; up: the update, the sample count and the loss."""
    d = simulate(method="fedavg", **SETTINGS)._experiment.network.layout.size
    for name in ("fedavg", "fedavg-ft", "fedprox", "ditto"):
        final = simulate(method=name, **SETTINGS).final
        assert final["bytes/down"] == 9 * d * 8 and final["bytes/up"] == 9 * (d + 2) * 8
    local = simulate(method="local", **SETTINGS).final
    assert local["bytes/down"] == 0 and local["bytes/up"] == 9 * 8  # the loss alone


def test_in_float32_everything_is_half_as_long(simulate: Callable[..., Run]) -> None:
    run = simulate(method="fedavg", train={"dtype": "float32"})
    assert run.final["bytes/down"] == 10 * run._experiment.network.layout.size * 4


# ---- clients outside the cohort


ABSENT: dict[str, Any] = {
    "train": {"rounds": 2, "local_epochs": 1, "availability": {"4": [[9, 10]], "3": [[1, 2]]}}
}
"""Client 4 never trains, client 3 trains in the first round only, the others always."""


def vectors(
    simulate: Callable[..., Run], name: str, unselected: str, **more: Any
) -> tuple[Run, list[Tensor]]:
    run = simulate(method={"name": name}, evaluate={"unselected": unselected}, **ABSENT, **more)
    return run, [run.vector(client) for client in range(5)]


def test_fedavg_ft_outside_the_cohort(simulate: Callable[..., Run]) -> None:
    kept_run, kept = vectors(simulate, "fedavg-ft", "keep_own")
    w, rows = kept_run.vector(), everything(kept_run)
    own = dict(zip(rows["rows/ids"].tolist(), rows["rows/own"], strict=True))
    assert set(own) == {0, 1, 2, 3} and kept_run.clients().selected.tolist() == [
        True,
        True,
        True,
        False,
        False,
    ]
    for client in range(4):
        assert torch.equal(kept[client], own[client])  # client 3 keeps what it trained in round 1
    assert torch.equal(kept[4], w)  # it never had a model of its own
    _, sent = vectors(simulate, "fedavg-ft", "deliver")
    assert torch.equal(sent[0], own[0]) and torch.equal(sent[3], w) and torch.equal(sent[4], w)
    run, tuned = vectors(simulate, "fedavg-ft", "finetune")
    experiment = run._experiment
    for client in (3, 4):  # one local training from the global model, off the books
        key = Key(0).fold("client", 2, 1).fold(torch.tensor([client])).fold("fit")
        data = experiment.federation.train.take(torch.tensor([client]))
        recipe = Recipe(lr=0.1, epochs=1, batch_size=5)
        close(
            tuned[client],
            slow_fit(experiment.network, w[None], experiment.federation.samples, data, key, recipe)[0],
        )
    assert torch.equal(tuned[0], own[0])
    assert everything(run).keys() == rows.keys() and torch.equal(
        everything(run)["rows/own"], rows["rows/own"]
    )  # nothing was written


def test_ditto_outside_the_cohort(simulate: Callable[..., Run]) -> None:
    """A client keeps its private model, or, where the protocol says so, would use what it is sent."""
    run, kept = vectors(simulate, "ditto", "keep_own")
    rows = everything(run)
    own = dict(zip(rows["rows/ids"].tolist(), rows["rows/personal"], strict=True))
    assert all(torch.equal(kept[c], own[c]) for c in range(4)) and torch.equal(kept[4], run.vector())
    _, sent = vectors(simulate, "ditto", "deliver")
    assert all(torch.equal(sent[c], own[c]) for c in range(3)) and all(
        torch.equal(sent[c], run.vector()) for c in (3, 4)
    )
    tuned_run, tuned = vectors(simulate, "ditto", "finetune")
    assert all(torch.equal(tuned[c], own[c]) for c in range(3))
    assert not torch.equal(tuned[3], own[3]) and not torch.equal(tuned[4], kept[4])
    assert_same(
        {k: v for k, v in everything(tuned_run).items() if k.startswith(("rows", "server"))},
        {k: v for k, v in rows.items() if k.startswith(("rows", "server"))},
        0.0,
    )


def test_a_lost_reply_is_not_taking_part(simulate: Callable[..., Run]) -> None:
    """With all replies lost, nobody has anything of its own: everybody would get the untouched start
    model."""
    run = simulate(method="fedavg-ft", train={"dropout": 1.0})
    assert not run.clients().selected.any() and torch.equal(run.vector(), run._experiment.initial)
    assert torch.equal(run.vector(0), run._experiment.initial)
    d = run._experiment.network.layout.size
    assert run.final["bytes/down"] == 10 * d * 8 and run.final["bytes/up"] == 0  # the request had been sent
    half = simulate(method="fedavg-ft", train={"dropout": 0.5, "rounds": 4})
    answered = [len(half.store.arrays(r)["took_part"]) for r in range(1, 5)]
    assert 0 < sum(answered) < 20 and half.final["bytes/up"] == sum(answered) * (d + 2) * 8


class Watching(Mean):
    """The mean, which looks at whom screening refused."""

    seen: list = []

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        self.seen.append((ctx.ids.tolist(), dict(ctx.refused)))
        return super().__call__(x, w, state, ctx)


def test_the_rule_learns_which_clients_were_refused(simulate: Callable[..., Run]) -> None:
    lengths = simulate(detectors=("norm",)).store.arrays(1)["verdict/scores/norm/norm"]
    longest = int(lengths.argmax())
    rule = Watching(seen=[])
    cap = float(lengths.sort().values[-2:].mean())
    simulate(aggregator=Clip(norm=1e9, unit="absolute")(rule), train={"norm_cap": cap, "rounds": 1})
    assert rule.seen == [
        ([i for i in range(5) if i != longest], {longest: f"update has a norm above {cap:g}"})
    ]


def test_a_simulation_has_no_cap_unless_set(simulate: Callable[..., Run]) -> None:
    run = simulate(train={"server_lr": 1e5}, detectors=({"name": "norm", "threshold": 1e12},))
    assert (
        run.store.arrays(2)["verdict/scores/norm/norm"].max() > FEDERATION_NORM_CAP
        and run.final["refused"] == 0
    )


def test_refused_by_everyone(simulate: Callable[..., Run]) -> None:
    run = simulate(method="fedavg", train={"norm_cap": 1e-9})
    assert torch.equal(run.vector(), run._experiment.initial) and run.final["refused"] == 10
    part = run.store.read_json("parts/000001.json")
    assert part is not None
    assert part["refused"]["0"] == "update has a norm above 1e-09" and any(
        "no update was used" in note for note in part["notes"]
    )
