"""What every registered network must keep: it is a backbone and a head, all of it learns, and no plan changes
what it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.data.federation import Samples
from holdfast.local.fit import Recipe
from holdfast.models.base import NetworkPart, check_reads
from holdfast.models.network import Network
from tests.helpers import LOOP, PLANS, built_in, deal, random_samples, slow_fit, starts, train

SHAPES: dict[str, tuple[int, ...]] = {
    "images": (1, 16, 16),
    "windows": (2, 18),
    "tables": (5,),
    "words": (7,),
}
SMALL: dict[str, dict[str, Any]] = {
    "cnn-bn": {"channels": 3, "hidden": 5},
    "cnn-512": {},
    "fedcap-cnn": {},
    "lenet": {},
    "mlp": {"hidden": 6, "dropout": 0.2},
    "resnet18": {"norm": "batch"},
    "text-cnn": {"rows": 40, "embedding": 3, "channels": 4},
    "text-mean": {"rows": 40, "embedding": 3},
}
OURS = {name: part for name, part in built_in("model").items() if name != "auto"}  # which names one of these
CASES = [(name, kind) for name, part in OURS.items() for kind in SHAPES if kind in part.reads]
every_case = pytest.mark.parametrize(("name", "kind"), CASES)
CLASSES = 3


def samples_of_kind(kind: str, rows: int = 40) -> Samples:
    shape = SHAPES[kind]
    if kind != "words":
        return random_samples(rows, shape, CLASSES)
    key = Key(0).fold("text")
    hashes, ends = (
        key.fold("x").hash(rows, *shape).remainder(2**31 - 1) + 1,
        key.fold("end").hash(rows).remainder(shape[0] + 1),
    )
    x = torch.where(torch.arange(shape[0]) < ends[:, None], hashes, 0).to(torch.int32)
    return Samples(x, key.fold("y").hash(rows).remainder(CLASSES), CLASSES, rows)


def network(name: str, kind: str) -> Network:
    part: Any = build("model", {"name": name, **SMALL.get(name, {})})
    return Network(lambda: part.build(SHAPES[kind], CLASSES), "head", f"{part} {kind}", torch.float64)


def module(name: str, kind: str) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = build("model", {"name": name, **SMALL.get(name, {})}).build(SHAPES[kind], CLASSES)
    return made.double()


def batch(kind: str, rows: int = 6) -> Tensor:
    return samples_of_kind(kind).batch(torch.arange(rows), torch.float64)


def test_every_network_is_among_the_cases() -> None:
    assert {name for name, _ in CASES} == set(OURS) == set(SMALL)
    assert all(issubclass(part, NetworkPart) for part in OURS.values())


@every_case
def test_every_network_has_a_backbone_and_a_linear_head(name: str, kind: str) -> None:
    net = module(name, kind).eval()
    assert [child for child, _ in net.named_children()] == ["backbone", "head"]
    head, backbone, x = net.get_submodule("head"), net.get_submodule("backbone"), batch(kind)
    assert isinstance(head, nn.Linear) and head.out_features == CLASSES
    features = backbone(x)
    assert features.shape == (len(x), head.in_features)
    assert net(x).shape == (len(x), CLASSES) and torch.equal(net(x), head(features))
    torch.testing.assert_close(
        net(x[:2]), net(x)[:2], rtol=0, atol=1e-12
    )  # no sample of a batch sees another


@every_case
def test_gradients_reach_all_parameters(name: str, kind: str) -> None:
    samples = samples_of_kind(kind, 4 if name == "resnet18" else 60)
    net = module(name, kind).train()
    nn.functional.cross_entropy(
        net(samples.batch(torch.arange(len(samples)), torch.float64)), samples.y
    ).backward()
    assert all(
        p.grad is not None and bool(p.grad.any()) and bool(torch.isfinite(p.grad).all())
        for p in net.parameters()
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*case, marks=pytest.mark.slow if case[0] == "resnet18" else ()) for case in CASES],
)
def test_every_plan_takes_the_same_steps(name: str, kind: str) -> None:
    """Ragged clients, so that batches are padded; against plain PyTorch too, where there is no Dropout, which
    it would draw otherwise."""
    net, samples = network(name, kind), samples_of_kind(kind)
    data, model = deal(samples, [7, 4, 9]), starts(net, 3)
    recipe = Recipe(lr=0.1, epochs=1, batch_size=4, momentum=0.5)
    loop = train(net, model, samples, data, recipe, LOOP)
    assert not torch.equal(loop.model, model)
    for title, plan in PLANS.items():
        other = train(net, model, samples, data, recipe, plan)
        torch.testing.assert_close(
            other.model, loop.model, rtol=0, atol=1e-10, msg=lambda m, t=title: f"{t}: {m}"
        )
        torch.testing.assert_close(other.loss, loop.loss, rtol=0, atol=1e-10)
    if not net.keyed:
        slow = slow_fit(
            net, model, samples, data, Key(0).fold("client").fold(torch.arange(len(data.count))), recipe
        )
        torch.testing.assert_close(loop.model, slow, rtol=0, atol=1e-10)


@every_case
def test_a_network_can_be_built_for_every_kind_it_reads(name: str, kind: str) -> None:
    check_reads(build("model", name), SHAPES[kind], kind == "words")
