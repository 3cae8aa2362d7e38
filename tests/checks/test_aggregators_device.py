"""Rules on a device: the same numbers as on the CPU, and the updates stay on the device."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator
from holdfast.core.registry import build
from holdfast.core.types import State
from tests.checks.aggregator_cases import EVERY_WAY, experiments
from tests.checks.test_aggregators_together import ROUNDED, same
from tests.helpers import built_in, some_now
from tests.pretended_gpu import PretendedGpu, pretended_gpu

READS_SETS = {"fedcpa"}
"""Rules of which the host reads more, the more parameters there are: FedCPA compares critical sets, a
hundredth of the parameters of each client, in NumPy."""
N = 7
INSIDE = ["mean", "median", "multi-krum", "fltrust", "norm-bound"]
every_way = pytest.mark.parametrize("settings", some_now(EVERY_WAY))


@every_way
def test_a_rule_on_a_device(settings: dict[str, Any]) -> None:
    check(build("aggregator", {"f": 1, **settings}))


@pytest.mark.parametrize(
    ("wrapper", "inner"),
    some_now(
        itertools.product(built_in("wrapper"), ["mean", "median", "multi-krum", "fltrust", "norm-bound"])
    ),
)
def test_a_wrapped_rule_on_a_device(wrapper: str, inner: str) -> None:
    check(build("wrapper", wrapper)(build("aggregator", {"name": inner, "f": 1})))


@every_way
def test_the_host_reads_no_more_of_longer_updates(settings: dict[str, Any]) -> None:
    rule: Aggregator = build("aggregator", {"f": 1, **settings})
    if rule.name in READS_SETS:
        return
    with pretended_gpu() as gpu:
        x, w, contexts = _moved(gpu, rule, 3000, 0)
        states = [rule.init(ctx.layout) for ctx in contexts]
        rule.together(x, w, states, contexts)
        for of in zip(x, w, states, contexts, strict=True):
            rule(*of)
        assert gpu.largest_read <= 8 * len(x) * N * N  # a table of clients for each experiment


def check(rule: Aggregator) -> None:
    """One by one and together, for several rounds; every second round finds weights, the model and what the
    rule remembers on the host."""
    d, tolerance = 24, ROUNDED.get(rule.layers()[0].name, 1e-12)
    layout = experiments(N, d, 0)[2][0].layout
    expected = apart = together = [rule.init(layout)] * 4
    with pretended_gpu() as gpu:
        for turn in range(3 if rule.remembers() else 2):
            x, w, contexts = experiments(N, d, turn)
            contexts = [replace(ctx, assumed=rule.assumed(N)) for ctx in contexts]
            right = [rule(*of) for of in zip(x, w, expected, contexts, strict=True)]
            x, w, contexts = _moved(gpu, rule, d, turn, host=turn == 1)
            if turn == 1:
                apart, together = ([_hosted(state) for state in states] for states in (apart, together))
            single = [rule(*of) for of in zip(x, w, apart, contexts, strict=True)]
            several = rule.together(x, w, together, contexts) or single
            for found in (single, several):
                for one, wanted in zip(found, right, strict=True):
                    assert one.value.device == gpu.device
                    same(
                        one._replace(
                            value=one.value.cpu(), weights=one.weights.cpu(), state=_hosted(one.state)
                        ),
                        wanted,
                        tolerance,
                    )
            expected, apart, together = ([each.state for each in found] for found in (right, single, several))


def _moved(
    gpu: PretendedGpu, rule: Aggregator, d: int, turn: int, host: bool = False
) -> tuple[Tensor, Tensor, list[AggregationContext]]:
    x, w, contexts = experiments(N, d, turn)
    here = "cpu" if host else gpu.device
    moved = []
    for ctx in contexts:
        assert ctx.root is not None
        moved.append(
            replace(
                ctx, assumed=rule.assumed(N), received=ctx.received.to(here), root=ctx.root.to(gpu.device)
            )
        )
    return x.to(gpu.device), w.to(here), moved


def _hosted(state: State) -> State:
    return {name: tensor.cpu() for name, tensor in state.items()}
