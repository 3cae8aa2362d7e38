"""Every registered detector with models on a device, and for several experiments at once, finds what it finds
on the CPU; the host is told nothing that is as long as a model."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.core.flat import Layout, Wire
from holdfast.core.generators import relay
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.core.together import alone, in_lockstep
from holdfast.core.types import Exchange, Uplink
from holdfast.detectors.base import Judgement
from tests.helpers import built_in
from tests.pretended_gpu import pretended_gpu

LAYOUT = Layout.of(nn.Linear(20, 12))
WIRE = Wire.of(LAYOUT, torch.ones(LAYOUT.size, dtype=torch.bool))
CLIENTS = torch.arange(10, 18)
CASES: list[dict[str, Any]] = [
    *({"name": name} for name in built_in("detector")),
    {"name": "norm", "threshold": 1.2, "unit": "median"},
    {"name": "normality", "correlation": "pearson", "action": "ban", "patience": 1},
    {"name": "committee", "tau": 0.5, "sample": 2, "vote": "median"},
]


def judging(settings: dict[str, Any], place: int, device: Any) -> Generator[Any, Any, Judgement]:
    """One experiment's round, in which client 12 sends no number, in the first two experiments."""
    luck = Key(place)
    reference = luck.fold("reference").normal(LAYOUT.size, dtype=torch.float64)
    models = reference + luck.normal(8, LAYOUT.size, dtype=torch.float64) * (1 + torch.arange(8))[:, None]
    if place < 2:
        models[2, place] = torch.nan
    ctx = SimpleNamespace(
        available=CLIENTS,
        cohort=CLIENTS,
        key=luck,
        counts=torch.arange(8.0),
        buffers=torch.ones(8, 2, dtype=torch.float64).to(device),
        reference=reference.to(device),
        refused={},
        layout=LAYOUT,
        wire=WIRE,
    )

    def ask(request: Any) -> Generator[Any, Any, Any]:
        if not isinstance(request, Exchange):
            return (yield request)
        assert request.bank.device == models.to(device).device and request.bank.shape == (8, LAYOUT.size + 2)
        score = luck.fold("score").uniform(*request.pick.shape, dtype=torch.float64)
        return Uplink(request.to, {"score": torch.where(request.pick < 0, -1.0, score)})

    found: Judgement = yield from relay(
        build("detector", settings).judge({}, ctx, models.to(device), CLIENTS), ask
    )
    return found


def assert_same(found: Judgement, expected: Judgement) -> None:
    assert found.banned == expected.banned and found.rejected == expected.rejected
    for name in ("state", "scores", "tables"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.keys() == other.keys()
        for key in other:
            torch.testing.assert_close(one[key].cpu(), other[key], rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("settings", CASES, ids=lambda case: "-".join(str(v) for v in case.values()))
def test_on_a_device_as_on_the_cpu(settings: dict[str, Any]) -> None:
    expected = [alone(judging(settings, place, "cpu")) for place in range(3)]
    assert expected[0].rejected or expected[0].banned
    with pretended_gpu() as gpu:
        found = in_lockstep([judging(settings, place, gpu.device) for place in range(3)])
        one_by_one = [alone(judging(settings, place, gpu.device)) for place in range(3)]
        assert gpu.largest_read < LAYOUT.size * 8, gpu
        assert all(score.device.type == "cpu" for one in found for score in one.scores.values())
    for several in (found, one_by_one):
        for one, other in zip(several, expected, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("name", ["norm", "committee"])
def test_the_host_waits_once_for_all_experiments(name: str) -> None:
    with pretended_gpu() as gpu:
        in_lockstep([judging({"name": name}, place, gpu.device) for place in range(3)])
        assert gpu.reads == 1
