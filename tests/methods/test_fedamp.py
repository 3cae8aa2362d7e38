"""FedAMP on models of two numbers, by hand, and as whole runs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from holdfast.core.registry import build
from holdfast.core.together import alone, computed_alone
from holdfast.local.plan import Plan
from holdfast.results.run import Run
from tests.checks.method_cases import hard
from tests.helpers import everything, slow_fit
from tests.methods.by_hand import answer, both_plans, close, context, local_of, received

Simulate = Callable[..., Run]


def served(**settings: float):
    method = build("method", {"name": "fedamp", **settings})
    return method.Server(method)


@both_plans
def test_a_client_goes_on_from_its_own_and_is_pulled_to_what_it_received(plan: Plan) -> None:
    """Client 4 at (0, 0): gradient (-1, 0), pull 3 / 2 ((0, 0) - (1, 2)). Client 7 at (1, 1): gradient (0,
    1), pull 1.5 (0, -1)."""
    method = build("method", "fedamp")
    start = {"own": torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)}
    state, sent = method.Client(method).train(local_of(plan, lam=3.0, alpha=2.0), start, received(), {})
    close(state["own"], [[0.25, 0.3], [1.0, 1.05]])
    close(sent["update"], [[0.25 - 1, 0.3 - 2], [0.0, 1.05 - 2]])


def test_mixtures_by_hand() -> None:
    """Squared distances: 4 to 7: 1, 4 to 9: 4, 7 to 9: 5; the newcomer 5 stands at the start (1, 2), 1, 2 and
    5 from the others."""
    server, ctx = served(alpha=0.6, sigma=2.0), context([4, 5])
    state = {
        "ids": torch.tensor([4, 7, 9]),
        "models": torch.tensor([[0.0, 2.0], [0.0, 1.0], [2.0, 2.0]], dtype=torch.float64),
    }
    sent, xi = alone(server.mixtures(state, ctx, ctx.cohort))

    def a(x: float) -> float:
        return 0.6 * math.exp(-x / 2) / 2

    near, far = a(1), a(4)
    close(xi, [[0.0, near, far], [a(1), a(2), a(1)]])
    own = 1 - 2 * a(1) - a(2)
    close(
        sent,
        [
            [2 * far, 2 * (1 - near - far) + near + 2 * far],
            [own + 2 * a(1), 2 * own + 2 * a(1) + a(2) + 2 * a(1)],
        ],
    )


def test_others_never_count_more_than_there_is() -> None:
    server, ctx = served(alpha=100.0), context([4])
    state = {
        "ids": torch.tensor([4, 7, 9]),
        "models": torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64),
    }
    sent, xi = alone(server.mixtures(state, ctx, ctx.cohort))
    close(xi, [[0.0, 0.5, 0.5]])
    close(sent, [[0.5, 0.5]])
    sent, _ = alone(served(alpha=100.0, least_own=0.5).mixtures(state, ctx, ctx.cohort))
    close(sent, [[0.75, 0.75]])


def test_a_round_keeps_what_was_sent() -> None:
    """Client 4 is known, 7 is new; 9 stays as it was; 7's reply is lost the first time."""
    server, ctx = served(sigma=1e9), context([4, 7])
    state = {
        "ids": torch.tensor([4, 9]),
        "models": torch.tensor([[3.0, 3.0], [5.0, 5.0]], dtype=torch.float64),
    }
    for replies, expected in (
        ([4], [[4.0, 3.0], [5.0, 5.0]]),
        ([4, 7], [[4.0, 3.0], [1.0, 1.0], [5.0, 5.0]]),
    ):
        steps = computed_alone(server.round(state, ctx))
        asked = next(steps)
        torch.testing.assert_close(
            asked.bank, torch.tensor([[3.0, 3.0], [1.0, 2.0]], dtype=torch.float64), rtol=0, atol=1e-7
        )
        assert asked.bytes_down().tolist() == [16, 16]
        with pytest.raises(StopIteration) as end:
            steps.send(answer(replies, [[1.0, 0.0], [0.0, -1.0]][: len(replies)], [1.0] * len(replies)))
        fresh, verdict = end.value.value
        torch.testing.assert_close(
            fresh["models"], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-7
        )
        assert fresh["ids"].tolist() == sorted([*replies, 9]) and verdict.ids.tolist() == replies
        assert verdict.tables["attention"].shape == (len(replies), 2) and verdict.tables[
            "attended"
        ].tolist() == [4, 9]


def test_counters_of_batch_norm_do_not_count_in_distances(simulate: Simulate) -> None:
    """Local steps are counted in buffers: with them inside the distance, clients with much data would be far
    from those with little."""
    run = simulate(**hard("fedamp", train={"participation": 1.0, "rounds": 2}))
    assert "num_batches_tracked" in str([slot.name for slot in run._experiment.network.layout.slots])
    p = run._experiment.network.layout.parameters
    kept = everything(simulate(**hard("fedamp", train={"participation": 1.0, "rounds": 1})))["server/models"][
        :, :p
    ]
    apart = torch.cdist(kept, kept) ** 2
    expected = torch.exp(-apart).fill_diagonal_(0)
    expected = expected / expected.sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(run.store.arrays(2)["verdict/tables/attention"], expected, rtol=0, atol=1e-9)
    told = run.table("attention")
    assert "attended" not in run.tables and set(told["round"]) == {2}  # before, nobody had sent anything
    shown = told.pivot(index="client", columns="other", values="value").to_numpy()
    torch.testing.assert_close(torch.tensor(shown), expected, rtol=0, atol=1e-9, check_dtype=False)


def test_without_attention_it_is_local_training_with_a_pull_to_the_own_last_model(simulate: Simulate) -> None:
    """Attention of 1e-30 to others. Reference: every client alone, pulled to where it stood when the round
    began."""
    table = {
        "method": {"name": "fedamp", "sigma": 1e30, "lam": 0.7},
        "model": {"name": "mlp", "hidden": 4},
        "train": {"rounds": 2, "local_epochs": 2},
    }
    run = simulate(**table)
    experiment = run._experiment
    network, federation = experiment.network, experiment.federation
    ids = torch.arange(federation.clients)
    models = experiment.initial.expand(len(ids), -1)
    for round in (1, 2):
        key = experiment.key.fold("client", round, 0).fold(ids).fold("fit")
        anchors = iter(models)

        def pulled(net, x, y, anchors=anchors, seen={}):  # noqa: B006
            if id(net) not in seen:
                seen.clear()
                seen[id(net)] = (net, network.layout.tensors(next(anchors)))
            pull = sum(
                ((value - seen[id(net)][1][name]) ** 2).sum() for name, value in net.named_parameters()
            )
            return torch.nn.functional.cross_entropy(net(x), y) + 0.35 * pull

        models = slow_fit(
            network,
            models,
            federation.samples,
            federation.train.take(ids),
            key,
            experiment.run_context.recipe,
            loss=pulled,
        )
    torch.testing.assert_close(everything(run)["rows/own"], models, rtol=0, atol=1e-12)


def test_without_a_pull_it_is_local(simulate: Simulate) -> None:
    changes = {"model": {"name": "mlp", "hidden": 4}, "train": {"rounds": 3, "participation": 0.6}}
    own = [
        everything(simulate(method=method, **changes))["rows/own"]
        for method in ({"name": "fedamp", "lam": 0.0}, {"name": "local"})
    ]
    torch.testing.assert_close(*own, rtol=0, atol=1e-12)
