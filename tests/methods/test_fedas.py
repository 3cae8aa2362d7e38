"""FedAS by hand on a model of two numbers, and whole runs against the algorithm written out slowly.

The model is f = b x, logits (h f, 0). Client 4 has x = 1, 3 of class 0 and x = 2 of class 1, client 7 only x
= 1 of class 0. The last own backbone of both is b = 2, the received one b = 1. Client 4's features were 2, 6
| 4, their class means 4 | 4; now they are 1, 3 | 2."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.aggregators.mean import Mean
from holdfast.core.errors import ConfigError
from holdfast.core.flat import Wire
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.core.screening import screen
from holdfast.core.together import computed_alone
from holdfast.core.types import ROOT, Exchange, State, Uplink, Verdict
from holdfast.detectors import Detector, Judgement
from holdfast.local import programs
from holdfast.local.client import Local, Received
from holdfast.local.fit import Recipe, fit
from holdfast.local.losses import cross_entropy
from holdfast.local.plan import Plan
from holdfast.local.programs import forget, refusals
from holdfast.methods.context import Context
from holdfast.methods.fedas import FedAS, jointly, misaligned, shares
from holdfast.models.channels import channels
from holdfast.models.network import Network
from holdfast.results.run import Run
from tests.checks.method_cases import hard
from tests.helpers import LOOP, VMAP, assert_same, client_keys, deal, everything, samples_of, slow_fit, starts

both_plans = pytest.mark.parametrize("plan", [LOOP, VMAP], ids=["loop", "vmap"])


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.head(self.b(x))
        return torch.cat([z, torch.zeros_like(z)], 1)


NETWORK = Network(Two, signature="test fedas", dtype=torch.float64)
WIRE = Wire.of(NETWORK.layout, ~NETWORK.head)
SAMPLES = samples_of(torch.tensor([[1.0], [3.0], [2.0], [1.0]]), torch.tensor([0, 0, 1, 0]))
THETA = torch.tensor([1.0], dtype=torch.float64)


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Tensor, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, double(expected), rtol=0, atol=tolerance)


def local_of(plan: Plan, **recipe: Any) -> Local:
    """By default nothing is trained after alignment."""
    given: dict[str, Any] = {"lr": 0.0, "batch_size": 4, **recipe}
    return Local(
        network=NETWORK,
        wire=WIRE,
        ids=torch.tensor([4, 7]),
        key=client_keys(2),
        samples=SAMPLES,
        data=deal(SAMPLES, [3, 1]),
        validation=deal(SAMPLES, [0, 0]),
        initial=double([[0.5, 0.0]] * 2),
        plan=plan,
        recipe=Recipe(**given),
        settings=SimpleNamespace(align_lr=torch.full((2,), 0.01, dtype=torch.float64)),
        selected=torch.tensor([True, True]),
    )


def received(has: bool = True) -> Received:
    return Received(THETA[None], torch.full((2, 1), 0 if has else -1), WIRE)


def state_of(h: float = 0.0, trained: tuple[bool, bool] = (True, True)) -> State:
    return {"own": double([[2.0, h]] * 2), "trained": torch.tensor(trained)}


def trained(
    plan: Plan, state: State | None = None, settings: dict[str, Any] | None = None, **recipe: Any
) -> tuple[State, dict[str, Tensor]]:
    method = build("method", {"name": "fedas", **(settings or {})})
    new, sent = method.Client(method).train(local_of(plan, **recipe), state or state_of(), received(), {})
    return new, dict(sent)


# ---- alignment


@both_plans
@pytest.mark.parametrize(
    ("target", "reduce", "expected"),
    [
        # class 0: mean of 2 (1 - 4) 1 and 2 (3 - 4) 3, which is -6; class 1: 2 (2 - 4) 2 = -8. Client 7: 2 (1
        # - 2) 1 = -2.
        ("prototype", "mean", [0.14, 0.02]),
        ("prototype", "sum", [0.20, 0.02]),
        # 2 (b - 2) x^2 = -2 (1 + 9 + 4), over 3 samples or summed
        ("sample", "mean", [0.28 / 3, 0.02]),
        ("sample", "sum", [0.28, 0.02]),
    ],
)
def test_alignment_by_hand(plan: Plan, target: str, reduce: str, expected: list[float]) -> None:
    state, sent = trained(plan, settings={"align_target": target, "align_loss": reduce})
    close(
        sent["update"], [[value] for value in expected]
    )  # measured from what was received: alignment is part of the update
    close(state["own"], [[1 + expected[0], 0.0], [1 + expected[1], 0.0]])
    assert state["trained"].tolist() == [True, True]


@both_plans
def test_alignment_goes_by_its_own_batches_and_epochs(plan: Plan) -> None:
    """Batches of 1 in the data's order: b = 1 + .01 * 2 (4 - 1) 1 = 1.06; + .01 * 2 (4 - 3.18) 3; then class
    1. Twice."""
    b = 1.0
    for _ in range(2):
        for x in (1, 3, 2):
            b += 0.01 * 2 * (4 - b * x) * x
    state, _ = trained(plan, settings={"align_batch_size": 1, "align_epochs": 2}, shuffle=False)
    close(state["own"][0], [b, 0.0])
    unmoved, _ = trained(plan, settings={"align_epochs": 0})
    close(unmoved["own"], [[1.0, 0.0]] * 2)


@both_plans
def test_class_means_may_leave_out_the_last_incomplete_batch(plan: Plan) -> None:
    """Batches of 2: 1, 3 of class 0 and 2, 5 of class 1; a 7 of class 0 is left over. Under b = 2 the means
    are 4 | 7, with the 7 they are 22/3 | 7. Steps: 1 + .01 * 6 = 1.06, where the mean of 4 (7 - 2.12) and 10
    (7 - 5.3) is 18.26. Client 7 has no whole batch."""
    samples = samples_of(
        torch.tensor([[1.0], [3.0], [2.0], [5.0], [7.0], [1.0]]), torch.tensor([0, 0, 1, 1, 0, 0])
    )
    for means, first in (("whole-batches", 4), ("all", 22 / 3)):
        method = build("method", {"name": "fedas", "align_means": means, "align_batch_size": 2})
        local = replace(
            local_of(plan, shuffle=False, drop_last=True), samples=samples, data=deal(samples, [5, 1])
        )
        _, sent = method.Client(method).train(local, state_of(), received(), {})
        b = 1 + 0.01 * ((first - 1) + 3 * (first - 3))
        close(sent["update"], [[b - 1 + 0.01 * (2 * (7 - 2 * b) + 5 * (7 - 5 * b))], [0.0]])


@both_plans
def test_a_class_without_a_whole_batch_pulls_nothing(plan: Plan) -> None:
    """Batches of 2, all of them used: 1, 3 of class 0 move b to 1.06; nothing is known of class 1, nor of
    client 7's only sample."""
    _, sent = trained(plan, settings={"align_means": "whole-batches", "align_batch_size": 2}, shuffle=False)
    close(sent["update"], [[0.06], [0.0]])
    _, sent = trained(
        plan,
        settings={"align": "joint", "align_means": "whole-batches", "align_batch_size": 2},
        lr=0.01,
        shuffle=False,
    )
    close(
        sent["update"], [[0.06], [0.0]]
    )  # all three in one batch; class 0 has the same mean over its own samples


@both_plans
@pytest.mark.parametrize(
    ("first", "expected"), [("skip", 0.0), ("literal", 0.14), ("received", 0.01 * 4 / 2)]
)
def test_the_first_time(plan: Plan, first: str, expected: float) -> None:
    """`received`: class means 2 | 2 of the features 1, 3 | 2: the mean of 2 (1 - 2) 1 and 2 (3 - 2) 3 is 2,
    downhill is -0.02."""
    sign = -1 if first == "received" else 1
    _, sent = trained(plan, state_of(trained=(False, True)), {"first": first})
    close(sent["update"], [[sign * expected], [0.02]])  # client 7 has trained before


@both_plans
def test_aligned_to_the_received_features(plan: Plan) -> None:
    _, sent = trained(plan, state_of(trained=(False, True)), {"align_to": "global"})
    close(sent["update"], [[-0.02], [0.0]])
    _, sent = trained(plan, settings={"align_to": "global", "align_target": "sample"})
    close(sent["update"], [[0.0], [0.0]])  # a model has its own features already


@both_plans
def test_alignment_as_a_term_of_training(plan: Plan) -> None:
    """With h = 0 cross-entropy does not move b; h itself moves by -.1 times the mean of (1/2 - [y = 0]) f:
    (-1 - 3 + 2) / 6."""
    state, sent = trained(plan, settings={"align": "joint"}, lr=0.1)
    close(sent["update"], [[1.4], [0.2]])
    close(state["own"][:, 1], [0.1 / 3, 0.05])
    _, sent = trained(
        plan, state_of(trained=(False, True)), {"align": "joint", "align_target": "sample"}, lr=0.1
    )
    close(sent["update"], [[0.0], [0.2]])


@both_plans
def test_a_client_with_less_than_a_batch_is_neither_aligned_nor_measured(plan: Plan) -> None:
    _, sent = trained(plan, settings={"align_batch_size": 3}, lr=0.1, batch_size=3, drop_last=True)
    assert float(sent["update"][1]) == 0.0 and float(sent["fim"][1]) == 0.0 and float(sent["fim"][0]) > 0


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


@both_plans
def test_alignment_keeps_running_statistics_unless_the_setting_allows_it(plan: Plan) -> None:
    network = Network(Normed, signature="test fedas normed", dtype=torch.float64)
    wire, p = Wire.of(network.layout, ~network.head), network.layout.parameters
    start, own = (network.initial(Key(seed)).expand(2, -1) for seed in (0, 1))
    for told in (False, True):
        method = build("method", {"name": "fedas", "align_statistics": told})
        local = replace(local_of(plan, epochs=0), network=network, wire=wire, initial=start)
        given = Received(wire.pack(start[:1]), torch.zeros(2, 1, dtype=torch.int64), wire)
        state, sent = method.Client(method).train(
            local, {"own": own, "trained": torch.tensor([True, False])}, given, {}
        )
        assert not torch.equal(state["own"][0, :p], wire.unpack(wire.pack(start), own)[0, :p])
        assert torch.equal(state["own"][0, p:], start[0, p:]) is not told
        assert torch.equal(
            state["own"][1], wire.unpack(wire.pack(start), own)[1]
        )  # it skipped: nothing moved at all
        assert torch.equal(state["own"][:, network.head], own[:, network.head])


@both_plans
def test_alignment_in_evaluation_mode_goes_by_running_statistics(plan: Plan) -> None:
    """One step on client 4's three samples, by autograd on the module in evaluation mode; the statistics are
    used and stay."""
    network = Network(Normed, signature="test fedas normed", dtype=torch.float64)
    wire = Wire.of(network.layout, ~network.head)
    start, own = (network.initial(Key(seed)).clone() for seed in (0, 1))
    start[network.layout.under("backbone.1.running_mean")] = 0.3
    method = build("method", {"name": "fedas", "align_mode": "evaluation", "align_statistics": True})
    local = replace(local_of(plan, epochs=0), network=network, wire=wire, initial=start.expand(2, -1))
    given = Received(wire.pack(start[None]), torch.zeros(2, 1, dtype=torch.int64), wire)
    state, _ = method.Client(method).train(
        local, {"own": own.expand(2, -1), "trained": torch.tensor([True, True])}, given, {}
    )
    x, y = SAMPLES.batch(torch.arange(3), torch.float64), torch.tensor([0, 0, 1])
    was = network.load(own, torch.float64).eval().backbone(x).detach()
    net = network.load(wire.unpack(wire.pack(start[None]), own[None])[0], torch.float64).eval()
    now = net.backbone(x)
    apart = sum(F.mse_loss(now[y == k], was[y == k].mean(0).expand_as(now[y == k])) for k in (0, 1))
    params = list(net.backbone.parameters())
    for parameter, grad in zip(params, torch.autograd.grad(apart, params), strict=True):
        parameter.data -= 0.01 * grad
    torch.testing.assert_close(state["own"][0], network.layout.flatten(net.state_dict()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("target", ["prototype", "sample"])
@pytest.mark.parametrize("joint", [False, True], ids=["before", "joint"])
def test_what_a_compiler_is_given_of_the_losses(target: str, joint: bool) -> None:
    """A hook, a second model inside the loss, evaluation mode for it: nothing of that must stop the step from
    being traced."""
    network = Network(Normed, signature=f"test fedas traced {target} {joint}", dtype=torch.float64)
    told: dict[str, Any] = {"head": "head", "target": target, "reduce": "mean"}
    loss = partial(jointly, loss=cross_entropy, **told) if joint else partial(misaligned, **told)
    aux = {f"was.{name}": value for name, value in network.layout.tensors(starts(network, 2, seed=1)).items()}
    aux = {"prototypes": Key(3).normal(2, 2, 2, dtype=torch.float64)} if target == "prototype" else aux
    forget()
    data, plan, aux = (
        deal(SAMPLES, [3, 1]),
        Plan("compiled-vmap"),
        aux | {"aligning": torch.ones(2, dtype=torch.float64)},
    )
    fit(
        network,
        starts(network, 2),
        SAMPLES,
        data,
        client_keys(2),
        Recipe(batch_size=2, loss=loss),
        plan,
        aux=aux,
    )
    (ready,) = programs._programs.values()
    want, got = ready._step(ready.memory), ready.traced()(ready.memory)
    assert want.keys() == got.keys()
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=0, atol=1e-12)


# ---- weights


def test_traces_become_weights() -> None:
    traces = double([1.0, 3.0, 0.0])
    close(_of(shares(traces, "proportional")), [0.25, 0.75, 0.0])
    e = [math.exp(v) for v in (-2, 0, -3)]
    close(_of(shares(traces, "softmax")), [v / sum(e) for v in e])
    close(_of(shares(traces * 1e5, "softmax", temperature=1e5)), [v / sum(e) for v in e])
    close(_of(shares(traces * 1e5, "softmax")), [0.0, 1.0, 0.0])
    close(_of(shares(traces + 1, "min-max")), [0.25, 0.75, 0.0])
    close(_of(shares(double([2.0, 2.0]), "min-max")), [0.5, 0.5])
    for normalise in ("proportional", "softmax", "min-max"):
        close(_of(shares(double([7.0]), normalise)), [1.0])  # one client
        for nothing in ([0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], []):
            assert shares(double(nothing), normalise) is None


def _of(weights: Tensor | None) -> Tensor:
    assert weights is not None and float(weights.sum()) == pytest.approx(1)
    return weights


def test_a_client_with_more_samples_has_more_weight_by_the_log_likelihood_of_all_of_them() -> None:
    """Client 4 has client 7's sample three times. Its gradient is three times as long: 9 of 10 parts; by the
    mean both have the same."""
    samples, local = samples_of(torch.ones(4, 1), torch.zeros(4, dtype=torch.int64)), local_of(LOOP)
    local = replace(local, samples=samples, data=deal(samples, [3, 1]))
    for of, expected in (("full", [0.9, 0.1]), ("full-mean", [0.5, 0.5])):
        method = build("method", {"name": "fedas", "fim": of, "align": "off"})
        close(
            _of(
                shares(
                    method.Client(method).train(local, state_of(1.0), received(), {})[1]["fim"],
                    "proportional",
                )
            ),
            expected,
        )


def test_no_weight_is_above_the_clip() -> None:
    close(_of(shares(double([1.0, 1.0, 2.0, 96.0]), "proportional", clip=2.0)), [0.125, 0.125, 0.25, 0.5])
    # 0.96 and 0.02, cut to 0.3, leave 0.7 for 1 : 2 : 1; the 2 has 0.35 of it and is cut in turn
    close(_of(shares(double([1.0, 2.0, 1.0, 96.0]), "proportional", clip=1.2)), [0.2, 0.3, 0.2, 0.3])
    close(
        _of(shares(double([0.0, 0.0, 5.0, 0.0]), "proportional", clip=3.0)),
        [0.25 / 3, 0.25 / 3, 0.75, 0.25 / 3],
    )
    close(_of(shares(double([1.0, 5.0]), "proportional", clip=1.0)), [0.5, 0.5])
    close(_of(shares(double([1.0, 1.5]), "proportional", clip=3.0)), [0.4, 0.6])


def context(**changes: Any) -> Context:
    given: dict[str, Any] = {
        "round": 3,
        "cohort": torch.tensor([4, 7]),
        "available": torch.arange(10),
        "key": Key(0),
        "wire": WIRE,
        "layout": NETWORK.layout,
        "initial": THETA,
        "aggregator": Mean(),
    }
    return Context(**{**given, **changes})


def answer(
    update: list[list[float]], fim: list[float], count: list[float], ids: tuple[int, ...] = (4, 7)
) -> Uplink:
    n = len(ids)
    fields = {
        "update": double(update).view(n, 1),
        "buffers": torch.zeros(n, 0, dtype=torch.float64),
        "count": double(count),
    }
    return Uplink(
        torch.tensor(ids, dtype=torch.int64), fields | {"fim": double(fim), "loss": double([0.0] * n)}
    )


def one_round(up: Uplink, ctx: Context | None = None, **settings: Any) -> tuple[State, Verdict]:
    method = build("method", {"name": "fedas", **settings})
    steps = computed_alone(method.Server(method).round({"model": THETA}, ctx or context()))
    next(steps)
    with pytest.raises(StopIteration) as end:
        steps.send(up)
    return end.value.value


def test_a_round_of_the_server_by_hand() -> None:
    up = answer([[0.4], [0.8]], [1.0, 3.0], [9, 1])
    state, verdict = one_round(up)
    close(state["model"], [1 + 0.1 + 0.6])  # Eq. 7 and 8, without the second 1/m
    close(verdict.tables["fim"], [1.0, 3.0])
    close(verdict.tables["alpha"], [0.25, 0.75])
    assert verdict.weights is not None and verdict.weights.tolist() == [0.25, 0.75]
    close(one_round(up, extra_1_over_m=True)[0]["model"], [1 + 0.7 / 2])
    close(one_round(up, clip=1.0)[0]["model"], [1.6])
    close(one_round(up, context(server_lr=0.5))[0]["model"], [1.35])
    state, verdict = one_round(up, synchronise=False)
    close(state["model"], [1 + 0.9 * 0.4 + 0.1 * 0.8])
    assert "fim" not in verdict.tables


@pytest.mark.parametrize("fim", [[0.0, 0.0], [math.nan, 1.0]])
def test_traces_that_say_nothing_leave_it_to_the_samples(fim: list[float]) -> None:
    state, verdict = one_round(answer([[0.4], [0.8]], fim, [9, 1]))
    close(state["model"], [1 + 0.9 * 0.4 + 0.1 * 0.8])
    assert any("clients count by samples" in note for note in verdict.notes)
    close(verdict.tables["alpha"], [0.9, 0.1])


def test_one_client_and_none() -> None:
    state, _ = one_round(answer([[0.8]], [0.001], [1], (7,)))
    close(state["model"], [1.8])
    state, verdict = one_round(answer([], [], [], ()))
    close(state["model"], [1.0])
    assert any("no client answered" in note for note in verdict.notes)


def test_weights_are_of_clients_that_passed_the_detectors_and_never_of_the_server() -> None:
    class Picky(Detector):
        """Turns client 5 away."""

        name = "picky"

        def judge(self, state: State, ctx: Context, models: Tensor, ids: Tensor) -> Any:
            yield from ()
            return Judgement(state, {}, rejected={5: "why not"})

    up = answer([[9.0], [0.4], [5.0], [0.8]], [50.0, 1.0, 60.0, 3.0], [1, 9, 1, 1], (ROOT, 4, 5, 7))
    state, verdict = one_round(up, context(detectors=(Picky(),)))
    close(state["model"], [1.7])
    assert verdict.ids.tolist() == [4, 5, 7] and verdict.rejected == {5: "why not"}
    close(verdict.tables["alpha"], [0.25, 0.0, 0.75])
    close(verdict.tables["fim"], [1.0, 60.0, 3.0])
    state, verdict = one_round(up.only(up.ids == 5), context(detectors=(Picky(),)))
    close(state["model"], [1.0])
    assert verdict.tables["alpha"].tolist() == [0.0] and verdict.notes == (
        "no update was used: the model stays as it was",
    )


def test_the_trace_is_a_score_that_screening_bounds_below() -> None:
    method = build("method", "fedas")
    schema = method.Client(method).schema("train", WIRE)
    assert schema["fim"].kind == "score"
    kept = screen(answer([[0.4], [0.8]], [1.0, -3.0], [9, 1]), schema)
    assert kept.ids.tolist() == [4] and "fim is below 0" in kept.refused[7]
    off = build("method", {"name": "fedas", "synchronise": False})
    assert "fim" not in off.Client(off).schema("train", WIRE)


# ---- the chain


def test_a_chain_by_hand() -> None:
    """Client 4 leaves 1.14 to client 7, whose alignment to 2 adds 0.01 * 2 * 0.86; the round's step is
    measured from theta."""
    method = build("method", {"name": "fedas", "align": "serial"})
    rule, server = method.Client(method), method.Server(method)
    steps = computed_alone(server.round({"model": THETA}, context()))
    state = state_of() | {"start": double([[0.0, 0.0]] * 2)}
    asked = next(steps)
    assert asked.task == "align" and asked.to.tolist() == [4] and asked.bytes_down().tolist() == [8]
    link = _answered(rule, "align", state, asked)
    close(link.fields["update"], [[0.14]])
    asked = steps.send(link)
    assert asked.task == "align" and asked.to.tolist() == [7]
    close(asked.bank, [[1.14]])
    link = _answered(rule, "align", state, asked)
    close(link.fields["update"], [[0.0172]])
    assert link.bytes_up().tolist() == [8]
    asked = steps.send(link)
    assert (
        asked.task == "train" and asked.to.tolist() == [4, 7] and asked.bytes_down().tolist() == [0, 0]
    )  # they have it
    with pytest.raises(StopIteration) as end:
        steps.send(answer([[0.4], [0.8]], [1.0, 3.0], [9, 1]))
    state, _ = end.value.value
    close(state["model"], [1 + 0.25 * (0.14 + 0.4) + 0.75 * (0.1572 + 0.8)])


def _answered(rule: Any, task: str, state: State, asked: Exchange) -> Uplink:
    both = Received(asked.bank, torch.zeros(2, 1, dtype=torch.int64), WIRE)
    new, sent = getattr(rule, task)(local_of(LOOP), state, both, {})
    row = 0 if int(asked.to[0]) == 4 else 1
    state["start"][row] = new["start"][row]
    return Uplink(asked.to, {name: value[row : row + 1] for name, value in sent.items()})


@both_plans
def test_a_link_trains_from_where_it_led_to(plan: Plan) -> None:
    method = build("method", {"name": "fedas", "align": "serial"})
    state = state_of() | {"start": double([[1.5, 0.0], [1.25, 0.0]])}
    new, sent = method.Client(method).train(local_of(plan, lr=0.1), state, received(has=False), {})
    close(sent["update"], [[0.0], [0.0]])  # h = 0 moves no backbone, and nothing is aligned twice
    close(new["own"][:, 0], [1.5, 1.25])
    assert new["own"][0, 1] != 0


def test_a_link_that_is_lost_breaks_nothing() -> None:
    method = build("method", {"name": "fedas", "align": "serial"})
    steps = computed_alone(method.Server(method).round({"model": THETA}, context()))
    next(steps)
    nobody = Uplink(
        torch.zeros(0, dtype=torch.int64), {"update": torch.zeros(0, 1), "buffers": torch.zeros(0, 0)}
    )
    asked = steps.send(nobody)
    assert asked.to.tolist() == [7] and asked.bank.tolist() == [[1.0]]
    asked = steps.send(nobody)
    assert asked.task == "train" and not len(asked.to)
    with pytest.raises(StopIteration) as end:
        steps.send(answer([], [], [], ()))
    assert end.value.value[0]["model"].tolist() == [1.0]


# ---- whole runs against the algorithm written out

SETTINGS: dict[str, Any] = {"train": {"rounds": 3, "local_epochs": 2, "participation": 0.6}}


class Slowly:
    """FedAS with nn.Module and torch.optim.SGD, client after client."""

    def __init__(self, run: Run):
        self.run, self.experiment = run, run._experiment
        self.method, self.network = self.experiment.method, self.experiment.network
        self.samples = self.experiment.federation.samples
        start = self.experiment.initial
        self.theta, self.own = start, {c: start for c in range(5)}
        self.trained: set[int] = set()

    def train(self) -> Slowly:
        head, serial = self.network.head, self.method.align == "serial"
        for round in (1, 2, 3):
            cohort = self.run.store.arrays(round)["cohort"].tolist()
            theta, alpha = self.theta, {}
            starts = {}
            for place, c in enumerate(cohort):
                starts[c] = torch.where(head, self.own[c], theta)
                if self.method.align != "off" and (c in self.trained or self.method.first == "literal"):
                    starts[c] = self.align(starts[c], c, round, place if serial else 0)
                theta = starts[c] if serial else self.theta
            for c in cohort:
                self.own[c] = self.fit(
                    starts[c], c, round, len(cohort) if serial else 0, "fit", lr=0.1, epochs=2, batch_size=5
                )
                alpha[c] = (
                    self.fisher(c)
                    if self.method.synchronise
                    else float(self.experiment.federation.train.counts[c])
                )
            self.trained |= set(cohort)
            self.theta = sum(
                (alpha[c] / sum(alpha.values()) * self.own[c] for c in cohort), torch.zeros_like(theta)
            )
        return self

    def fit(
        self, model: Tensor, c: int, round: int, step: int, purpose: str, loss: Any = None, **recipe: Any
    ) -> Tensor:
        key = Key(0).fold("client", round, step).fold(torch.tensor([c])).fold(purpose)
        data = self.experiment.federation.train.take(torch.tensor([c]))
        return slow_fit(self.network, model[None], self.samples, data, key, Recipe(**recipe), loss=loss)[0]

    def held(self, c: int) -> tuple[Tensor, Tensor]:
        rows, labels = self.experiment.federation.train.client(c)
        return self.samples.batch(rows, torch.float64), labels

    def align(self, model: Tensor, c: int, round: int, step: int) -> Tensor:
        x, y = self.held(c)
        if self.method.align_means == "whole-batches":
            x, y = x[: len(y) // 16 * 16], y[: len(y) // 16 * 16]
        with torch.no_grad():
            was = self.network.load(self.own[c], torch.float64).backbone(x)
        mean = {int(k): was[y == k].mean(0) for k in y.unique()}

        def loss(net: Any, x: Tensor, y: Tensor) -> Tensor:
            known = [k for k in y.unique() if int(k) in mean]
            apart = (
                F.mse_loss(net.backbone(x[y == k]), mean[int(k)].expand(int((y == k).sum()), -1))
                for k in known
            )
            return sum(apart, 0 * net.backbone(x).sum())

        return self.fit(model, c, round, step, "align", loss, lr=0.01, epochs=1, batch_size=16)

    def fisher(self, c: int) -> float:
        x, y = self.held(c)
        net = self.network.load(self.own[c], torch.float64)
        batches = zip(x.split(5), y.split(5), strict=True)
        grads = [torch.autograd.grad(F.cross_entropy(net(a), b), list(net.parameters())) for a, b in batches]
        return sum(float(g.square().sum()) for batch in grads for g in batch)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"variant": "authors"},
        {"synchronise": False},
        {"align": "off"},
        {"align": "off", "synchronise": False},
    ],
    ids=["fedas", "authors", "alignment only", "synchronisation only", "neither: FedPer"],
)
def test_a_run_equals_the_algorithm_written_out(
    settings: dict[str, Any], simulate: Callable[..., Run]
) -> None:
    run = simulate(method={"name": "fedas", **settings}, **SETTINGS)
    slow = Slowly(run).train()
    torch.testing.assert_close(run.state()["model"], slow.theta[~slow.network.head], rtol=0, atol=1e-12)
    for c in slow.trained:
        torch.testing.assert_close(run.vector(c), slow.own[c], rtol=0, atol=1e-12)


def test_bytes(simulate: Callable[..., Run]) -> None:
    """A backbone down; a backbone, the trace, the count and the loss up. A chain sends the aligned backbones
    up, too."""
    backbone = 64 * 6 + 6
    for settings, down, up in (
        ({}, backbone, backbone + 3),
        ({"synchronise": False}, backbone, backbone + 2),
        ({"align": "serial"}, backbone, 2 * backbone + 3),
    ):
        part = simulate(
            method={"name": "fedas", **settings}, train={"rounds": 1, "participation": 0.6}
        ).metrics.iloc[-1]
        assert part["bytes/down"] == 3 * 8 * down and part["bytes/up"] == 3 * 8 * up


VARIANTS: list[dict[str, Any]] = [
    {"variant": "authors"},
    {"align_target": "sample", "first": "literal"},
    {"align": "joint", "fim": "per-sample"},
    {"decoupling": "channels", "rho": 0.4, "fim": "full", "normalise": "min-max", "clip": 1.5},
]


def table(settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return hard("fedas", method=settings, **{"train": {"rounds": 2, "local_epochs": 1}, **changes})


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_switches_are_the_same_under_every_plan(
    settings: dict[str, Any], simulate: Callable[..., Run]
) -> None:
    before = refusals()
    loop, replayed = (
        everything(simulate(**table(settings, engine={"plan": plan}))) for plan in ("loop", "compiled-vmap")
    )
    assert_same(loop, replayed, 1e-10)
    assert refusals() == before  # no loss was one that cannot be replayed


@pytest.mark.slow
@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_switches_are_the_same_fused(
    settings: dict[str, Any], simulate: Callable[..., Run], simulate_all: Callable[..., list[Run]]
) -> None:
    both = [table(settings), table({**settings, "align_lr": 0.05}, seed=1, data={"clients": 3})]
    for fused, alone in zip(simulate_all(both), both, strict=True):
        assert_same(everything(fused), everything(simulate(**alone)), 1e-10)


# ---- what travels, and who lies


def test_channels_that_travel() -> None:
    """Half of 3 outputs is rounded to 2; a layer's rows are its output channels."""
    network = Network(
        lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)),
        head=None,
        signature="test channels",
        dtype=torch.float64,
    )
    assert channels(network, 0.5).int().tolist() == [1, 1, 1, 1, 0, 0, *[1, 1, 0] * 3, *[1, 1, 0] * 2, 1]
    assert channels(network, 1.0).all() and int(channels(network, 0.0).sum()) == 1


def test_without_private_channels_only_alignment_and_weights_tell_it_from_fine_tuned_fedavg(
    simulate: Callable[..., Run],
) -> None:
    split = simulate(
        method={"name": "fedas", "decoupling": "channels", "rho": 0.0, "align": "off", "synchronise": False},
        **SETTINGS,
    )
    tuned = simulate(method="fedavg-ft", **SETTINGS)
    torch.testing.assert_close(split.state()["model"], tuned.state()["model"], rtol=0, atol=1e-12)


def test_experiments_with_other_channels_are_not_one() -> None:
    def structure(**settings: Any) -> Any:
        return build("method", {"name": "fedas", **settings}).structure()

    assert structure(decoupling="channels", rho=0.2) != structure(decoupling="channels", rho=0.7)
    assert structure(decoupling="channels", align_lr=0.2) == structure(decoupling="channels", align_lr=0.7)


def test_a_false_trace_dominates_the_average_unless_clipped(simulate: Callable[..., Run]) -> None:
    attack = {"name": "gaussian", "clients": [2], "claims": {"score": 1e6}}
    for settings, most in (({}, 0.999), ({"clip": 2.0}, 0.4)):
        run = simulate(method={"name": "fedas", **settings}, attack=attack, train={"rounds": 1})
        alpha = run.store.arrays(1)["verdict/tables/alpha"]
        assert float(alpha[2]) == pytest.approx(most, abs=2e-3) and float(alpha.sum()) == pytest.approx(1)


def test_traces_are_recorded_beside_the_ids_of_their_clients(simulate: Callable[..., Run]) -> None:
    """The norm test bans client 1, whose update screening refused: it is among the judged, and said no
    trace."""
    attack = {"name": "sign-flip", "scale": 1e308, "lies": {"update": 1e308}, "clients": [1]}
    with_it = simulate(method="fedas", attack=attack, detectors=["norm"], train={"rounds": 1}).store.arrays(1)
    honest = simulate(method="fedas", train={"rounds": 1}).store.arrays(1)
    assert with_it["verdict/ids"].tolist() == honest["verdict/ids"].tolist() == [0, 1, 2, 3, 4]
    fim, alpha, others = with_it["verdict/tables/fim"], with_it["verdict/tables/alpha"], [0, 2, 3, 4]
    assert fim.isnan().tolist() == [False, True, False, False, False] and alpha[1] == 0
    assert torch.equal(fim[others], honest["verdict/tables/fim"][others])
    torch.testing.assert_close(alpha[others], fim[others] / fim[others].sum())


@pytest.mark.parametrize("align", ["parallel", "serial"])
def test_under_attack_by_config(align: str, simulate: Callable[..., Run]) -> None:
    run = simulate(
        method={"name": "fedas", "align": align}, attack={"name": "ipm", "fraction": 0.2}, aggregator="rfa"
    )
    assert torch.isfinite(run.state()["model"]).all() and run.final["accuracy"] > 0
    run = simulate(method={"name": "fedas", "align": align}, aggregator="fltrust", data={"root": 20})
    assert torch.isfinite(run.state()["model"]).all()
    part = run.store.read_json("parts/000001.json")
    assert (
        part is not None
        and any("ignores" in note for note in part["notes"])
        is not run._experiment.parts.aggregator.uses_priors
    )


def test_the_authors_variant_is_a_preset_that_given_settings_win_over() -> None:
    authors = build("method", {"name": "fedas", "variant": "authors"})
    assert (authors.align, authors.first, authors.align_means, authors.align_mode) == (
        "serial",
        "literal",
        "whole-batches",
        "evaluation",
    )
    assert not authors.align_statistics
    mixed = build("method", {"name": "fedas", "variant": "authors", "first": "skip"})
    assert (mixed.align, mixed.first) == ("serial", "skip")
    assert build("method", {"name": "fedas", **authors.settings()}) == authors
    assert FedAS().align == "parallel"


class Around(nn.Module):
    """Uses its head's numbers, but never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.ReLU()), nn.Linear(7, 10)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.body(x), self.fc.weight, self.fc.bias)


def test_a_head_that_is_never_called_is_an_error_of_the_first_round(simulate: Callable[..., Run]) -> None:
    """Not of the second, in which somebody has features to align to."""
    import holdfast

    model = holdfast.Model(Around, head="fc")
    with pytest.raises(ConfigError, match="the forward pass never calls the head 'fc'"):
        simulate(method="fedas", model=model, train={"rounds": 1})
    assert simulate(method={"name": "fedas", "align": "off"}, model=model, train={"rounds": 1}).round == 1


def test_a_network_without_a_head_is_refused_with_advice(simulate: Callable[..., Run]) -> None:
    import holdfast

    with pytest.raises(ConfigError, match="this method needs a head"):
        simulate(
            method="fedas",
            model=holdfast.Model(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), head=None),
        )
