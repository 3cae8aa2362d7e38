"""Rules on a device: the same numbers as on the CPU, and the updates stay on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.core.registry import build
from holdfast.core.types import State
from tests.checks.aggregator_cases import EVERY_WAY, experiments
from tests.checks.test_wrappers import REFUSED, RULES, WRAPPERS
from tests.pretended_gpu import PretendedGpu, pretended_gpu

READS_SETS = {"fedcpa"}
"""Rules of which the host reads more, the more parameters there are: FedCPA compares critical sets, a
hundredth of the parameters of each client, in NumPy."""
N = 7
every_way = pytest.mark.parametrize("settings", EVERY_WAY)
every_pair = pytest.mark.parametrize(
    ("wrapper", "inner"), [(w, r) for w in WRAPPERS for r in RULES if (w, r) not in REFUSED]
)


@every_way
def test_a_rule_on_a_device(settings: dict[str, Any]) -> None:
    check(build("aggregator", {"f": 1, **settings}))


@every_pair
def test_a_wrapped_rule_on_a_device(wrapper: str, inner: str) -> None:
    check(build("wrapper", wrapper)(build("aggregator", {"name": inner, "f": 1})))


@every_way
def test_the_host_reads_no_more_of_longer_updates(settings: dict[str, Any]) -> None:
    rule: Aggregator = build("aggregator", {"f": 1, **settings})
    if rule.name in READS_SETS:
        return
    limit = 4 * 8 * N * N
    for d in (30, 3000):
        with pretended_gpu() as gpu:
            x, w, contexts = _moved(gpu, rule, d, 0)
            states = [rule.init(ctx.layout) for ctx in contexts]
            rule.together(x, w, states, contexts)
            for of in zip(x, w, states, contexts, strict=True):
                rule(*of)
            assert gpu.largest_read <= limit


def check(rule: Aggregator) -> None:
    """One by one and together, weights and memory on the host and on the device, over two rounds."""
    d = 24
    layout = experiments(N, d, 0)[2][0].layout
    for host in (False, True):
        expected = [rule.init(layout)] * 4
        with pretended_gpu() as gpu:
            apart = together = [rule.init(layout)] * 4
            for turn in range(2):
                x, w, contexts = experiments(N, d, turn)
                contexts = [replace(ctx, assumed=rule.assumed(N)) for ctx in contexts]
                right = [rule(*of) for of in zip(x, w, expected, contexts, strict=True)]
                x, w, contexts = _moved(gpu, rule, d, turn, host)
                if host:
                    apart, together = ([_hosted(state) for state in states] for states in (apart, together))
                single = [rule(*of) for of in zip(x, w, apart, contexts, strict=True)]
                several = rule.together(x, w, together, contexts) or single
                for one, other, wanted in zip(single, several, right, strict=True):
                    same(one, wanted, gpu)
                    same(other, wanted, gpu)
                expected, apart, together = (
                    [each.state for each in found] for found in (right, single, several)
                )


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


def same(found: Reduced, wanted: Reduced, gpu: PretendedGpu) -> None:
    assert found.value.device == gpu.device
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(found.value.cpu(), wanted.value, **close)
    torch.testing.assert_close(found.weights.cpu(), wanted.weights, **close)
    torch.testing.assert_close(_hosted(found.state), wanted.state, **close)
    assert found.fallback is wanted.fallback and found.partial is wanted.partial
