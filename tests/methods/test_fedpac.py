"""FedPAC against its formulas written out slowly, and its rounds on a model of three numbers: f = b x, logits
(h0 f, h1 f)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.core.screening import screen
from holdfast.core.types import Uplink
from holdfast.detectors import Detector, Judgement
from holdfast.evaluation.prototypes import prototypes
from holdfast.local.fit import Recipe
from holdfast.local.plan import Plan
from holdfast.methods.fedpac import FedPAC, mixtures, statistics
from holdfast.models.backbone_head import BackboneHead
from holdfast.models.network import Network
from holdfast.results.run import Run
from tests.checks.method_cases import hard
from tests.helpers import LOOP, VMAP, deal, everything, random_samples, slow_fit, starts
from tests.methods.halves import close, context_of, delivered, double, local_of, one_round, sent_to

both_plans = pytest.mark.parametrize("plan", [LOOP, VMAP], ids=["loop", "vmap"])
NETWORK = Network(
    lambda: BackboneHead(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)),
    signature="test fedpac",
    dtype=torch.float64,
)
START = double([1.0, 0.0, 0.0])  # b, h0, h1
COUNTS = [7, 1, 30, 5]
SAMPLES = random_samples(43)
DEEP = Network(
    lambda: BackboneHead(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 3)),
    signature="test fedpac deep",
    dtype=torch.float64,
)


def method_of(**settings: Any) -> FedPAC:
    return build("method", {"name": "fedpac", **settings})


def test_statistics_are_the_authors_traces() -> None:
    """V and h by the d x d matrices of the released code."""
    data, models = deal(SAMPLES, COUNTS), starts(DEEP, 4)
    variance, h = statistics(prototypes(DEEP, models, SAMPLES, data, LOOP, "head"))
    for i, count in enumerate(COUNTS):
        net = DEEP.load(models[i], torch.float64)
        x, y = SAMPLES.batch(data.rows[i, :count], torch.float64), data.labels[i, :count]
        found, v = net.backbone(x).detach(), 0.0
        for c in range(3):
            mine, p = found[y == c], float((y == c).double().mean())
            if len(mine):
                mean = mine.mean(0)
                close(h[i, c], p * mean)
                v += p * float(torch.trace(mine.T @ mine / len(mine))) - p * p * float(mean @ mean)
            else:
                assert not h[i, c].any()
        assert float(variance[i]) == pytest.approx(v / count, abs=1e-12)


def test_mixtures_minimise_bias_and_variance() -> None:
    """Two clients, one class, h = 0 and 1, V = 1 and 3. For client 0, B = (0, 0; 0, 1): min a0^2 + 4 a1^2 at
    (4, 1) / 5. For client 1, B = (1, 0; 0, 0): min 2 a0^2 + 3 a1^2 at (3, 2) / 5."""
    alpha, alone = mixtures(double([1.0, 3.0]), double([[[0.0]], [[1.0]]]), 1e-3)
    close(alpha, [[0.8, 0.2], [0.6, 0.4]])
    close(mixtures(double([1.0, 3.0]), double([[[0.0]], [[1.0]]]), 0.3)[0], [[1.0, 0.0], [0.6, 0.4]])
    assert alone == []


def test_the_matrix_is_the_cards() -> None:
    """B_i[j, l] = sum_c <h_i,c - h_j,c, h_i,c - h_l,c>, and the mixture is better than a thousand others."""
    variance, h = Key(1).uniform(5, dtype=torch.float64), Key(2).normal(5, 3, 4, dtype=torch.float64)
    alpha, _ = mixtures(variance, h, 0.0)
    luck = Key(3).uniform(1000, 5, dtype=torch.float64).log()
    others = luck / luck.sum(1, keepdim=True)
    for i in range(5):
        m = torch.diag(variance)
        for j in range(5):
            for k in range(5):
                m[j, k] += sum(float((h[i, c] - h[j, c]) @ (h[i, c] - h[k, c])) for c in range(3))
        assert float(alpha[i] @ m @ alpha[i]) <= float((others @ m * others).sum(1).min())


def test_numbers_beyond_all_bounds_leave_each_with_its_own_head() -> None:
    alpha, alone = mixtures(double([1.0, 1.0]), double([[[1e200]], [[1.0]]]), 1e-3)
    close(alpha, [[1.0, 0.0], [0.0, 1.0]])
    assert alone == [0, 1]


@pytest.mark.parametrize("times", [1e3, 1e15])
@pytest.mark.parametrize("lie", ["features", "variance"])
def test_one_false_report_does_not_level_the_others_mixtures(lie: str, times: float) -> None:
    """Features or a variance beyond all measure keep the liar out of everybody's mixture; hardly anything
    changes between the others."""
    variance, h = 0.2 + Key(1).uniform(6, dtype=torch.float64), Key(2).normal(6, 3, 4, dtype=torch.float64)
    honest, _ = mixtures(variance[:5], h[:5], 0.0)
    variance[5], h[5] = (variance[5] * times, h[5]) if lie == "variance" else (variance[5], h[5] * times)
    lied, _ = mixtures(variance, h, 0.0)
    torch.testing.assert_close(
        lied[:5, :5], honest, rtol=0, atol=0.03
    )  # to lean on absurd features a very little may even be best
    assert float(lied[:5, 5].max()) < 0.01


@both_plans
def test_a_client_trains_the_head_and_then_the_body(plan: Plan) -> None:
    method = method_of(lam=0.7)
    rule, models, n = method.Client(method), starts(DEEP, 4), 4
    recipe = Recipe(lr=0.1, epochs=2, batch_size=4)
    local = local_of(DEEP, rule, SAMPLES, COUNTS, plan, [1, 2, 5, 9], recipe, lam=0.7)
    aim, known = Key(5).normal(3, 4, dtype=torch.float64), double([1.0, 0.0, 1.0])
    extra = {"prototypes": aim.expand(n, 3, 4), "known": known.expand(n, 3)}
    state, sent = rule.train(
        local, {"own": torch.zeros_like(models)}, sent_to(local, models, [0, 1, 2, 3]), extra
    )

    def body_loss(net: Any, x: Tensor, y: Tensor) -> Tensor:
        found = net.backbone(x)
        goal = torch.where(known[y][:, None] > 0, aim[y], found.detach())
        return F.cross_entropy(net.head(found), y) + 0.7 * F.mse_loss(found, goal)

    def phase(start: Tensor, part: str, purpose: str, epochs: int, loss: Any) -> Tensor:
        network = Network(DEEP._make, signature="slow", dtype=torch.float64)
        load = network.load

        def freezing(vector: Tensor, dtype: torch.dtype | None = None) -> nn.Module:
            net = load(vector, dtype)
            net.get_submodule(part).requires_grad_(False)
            return net

        network.load = freezing  # type: ignore[method-assign]
        return slow_fit(
            network,
            start,
            SAMPLES,
            local.data,
            local.key.fold(purpose),
            replace(recipe, epochs=epochs),
            loss=loss,
        )

    begun = phase(models, "backbone", "head", 1, lambda net, x, y: F.cross_entropy(net(x), y))
    expected = phase(begun, "head", "fit", 2, body_loss)
    close(state["own"], expected)
    close(sent["update"], expected - models)
    seen, own = (prototypes(DEEP, m, SAMPLES, local.data, LOOP, "head") for m in (models, expected))
    close(sent["prototypes"], own.means)
    close(sent["h"], statistics(seen)[1])
    close(sent["variance"], statistics(seen)[0])
    assert not screen(Uplink(local.ids, sent), rule.schema("train", local.wire)).refused


def test_training_the_head_leaves_the_bodys_running_statistics_alone(simulate: Callable[..., Run]) -> None:
    run = simulate(**hard("fedpac", train={"rounds": 1, "local_epochs": 0}))
    layout, own = run._experiment.network.layout, everything(run)["rows/own"]
    body = ~run._experiment.network.head
    assert bool(body[layout.parameters :].any()) and bool(
        (own[:, ~body] != run._experiment.initial[~body]).any()
    )
    assert torch.equal(own[:, body], run._experiment.initial[body].expand(len(own), -1))


def replies(ids: list[int], update: Any, h: Any, variance: Any, means: Any, held: Any) -> Uplink:
    n = len(ids)
    fields = {
        "update": double(update).reshape(n, 3),
        "buffers": double([[]] * n),
        "count": double([1.0] * n),
        "loss": double([0.0] * n),
        "prototypes": double(means).reshape(n, 2, 1),
        "held": double(held).reshape(n, 2),
        "h": double(h).reshape(n, 2, 1),
        "variance": double(variance),
    }
    return Uplink(torch.tensor(ids), fields)


UP = replies(
    [4, 7],
    [[1.0, 1.0, 0.0], [3.0, 0.0, 1.0]],
    [[0.0, 0.0], [1.0, 0.0]],
    [1.0, 3.0],
    [[2.0, 0.0], [4.0, 9.0]],
    [[3, 0], [1, 0]],
)


def test_a_round_of_the_server() -> None:
    method = method_of()
    ctx = context_of(NETWORK, method.Client(method), START, [4, 7], head=NETWORK.head)
    (asked,), state, verdict = one_round(method, method.Server(method).init(ctx), ctx, UP)
    assert asked.bank.tolist() == [START.tolist()] and asked.extra["known"].tolist() == [[0, 0]] * 2
    close(state["model"], [1.0 + 2.0, 0.5, 0.5])
    close(state["models"], [[0.8, 0.2], [0.6, 0.4]])  # alpha of the test above, heads (1, 0) and (0, 1)
    close(state["prototypes"], [[(3 * 2.0 + 4.0) / 4], [0.0]])
    assert state["known"].tolist() == [1, 0] and state["ids"].tolist() == [4, 7]
    close(verdict.tables["alpha"], [[0.8, 0.2], [0.6, 0.4]])
    later = delivered(method, state, ctx, [4, 5, 7])
    close(
        later.bank[later.pick[:, 0]], [[3.0, 0.8, 0.2], [3.0, 0.5, 0.5], [3.0, 0.6, 0.4]]
    )  # 5 was never seen: the common head
    # round 2: client 7 comes from its own head (0.6, 0.4) and moves by (0, 1, 0); client 5 from the common
    # one, and stays
    ctx = context_of(NETWORK, method.Client(method), START, [5, 7], head=NETWORK.head)
    up = replies(
        [5, 7],
        [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]],
        [[0.0, 0.0]] * 2,
        [1.0, 1.0],
        [[1.0, 5.0]] * 2,
        [[0, 2], [0, 2]],
    )
    _, state, _ = one_round(method, state, ctx, up)
    close(state["model"], [3.0, (0.5 + 1.6) / 2, (0.5 + 0.4) / 2])
    close(state["models"], [[0.8, 0.2], [1.05, 0.45], [1.05, 0.45]])
    close(state["prototypes"], [[2.5], [5.0]])


def test_own_heads_go_by_place_and_not_by_id() -> None:
    """Clients 4 and 7 of a federation: where the programme has no answer, each keeps what it sent itself."""
    method = method_of()
    ctx = context_of(NETWORK, method.Client(method), START, [4, 7], head=NETWORK.head)
    up = replace(UP, fields={**UP.fields, "h": double([[[1e200], [0.0]], [[0.0], [0.0]]])})
    _, state, verdict = one_round(method, method.Server(method).init(ctx), ctx, up)
    close(state["models"], [[1.0, 0.0], [0.0, 1.0]])
    assert "client 7 keeps its own head" in verdict.notes[1]


class NotSeven(Detector):
    """Turns client 7 away."""

    def judge(self, state: Any, ctx: Any, models: Tensor, ids: Tensor) -> Any:
        yield from ()
        return Judgement(state, {}, {}, rejected={7: "seven"})


def test_a_client_that_is_rejected_or_has_no_samples_is_in_no_mixture() -> None:
    method = method_of()
    ctx = context_of(
        NETWORK, method.Client(method), START, [4, 7], head=NETWORK.head, detectors=(NotSeven(),)
    )
    _, state, verdict = one_round(method, method.Server(method).init(ctx), ctx, UP)
    close(state["model"], [2.0, 1.0, 0.0])
    close(verdict.tables["alpha"], [[1.0, 0.0], [0.0, 0.0]])
    assert state["ids"].tolist() == [4]
    ctx = context_of(NETWORK, method.Client(method), START, [4, 7], head=NETWORK.head)
    empty = replace(UP, fields={**UP.fields, "held": double([[3.0, 0.0], [0.0, 0.0]])})
    _, state, _ = one_round(method, method.Server(method).init(ctx), ctx, empty)
    assert state["ids"].tolist() == [4] and float(state["prototypes"][0]) == 2.0


def test_with_fixed_heads_and_no_pull_bodies_are_averaged_as_by_fedbabu(simulate: Callable[..., Run]) -> None:
    """However heads are mixed, a mixture of equal ones is the same; c-pfl without committee and tuning just
    averages bodies."""
    plain, pac = (
        simulate(**hard(name, method=table))
        for name, table in {
            "c-pfl": {"committee": False, "tune_epochs": 0},
            "fedpac": {"lam": 0.0, "head_epochs": 0},
        }.items()
    )
    body = ~pac._experiment.network.head
    torch.testing.assert_close(pac.state()["model"][body], plain.state()["model"], rtol=0, atol=1e-12)


def test_bytes_and_a_client_first_seen_late(simulate: Callable[..., Run]) -> None:
    run = simulate(**hard("fedpac", train={"participation": 1.0, "availability": {"0": [[3, 4]]}}))
    size = len(run.state()["model"]) * 8
    assert run.metrics["bytes/down"].tolist() == [n * (size + 70 * 8) for n in (4, 4, 5)]
    assert run.metrics["bytes/up"].tolist() == [n * (size + (2 + 60 + 10 + 60 + 1) * 8) for n in (4, 4, 5)]
    assert run.state()["ids"].tolist() == [0, 1, 2, 3, 4]
    alpha = run.store.arrays(3)["verdict/tables/alpha"]
    torch.testing.assert_close(alpha.sum(1), torch.ones(5, dtype=torch.float64))
    assert "rows/own" in everything(run)
