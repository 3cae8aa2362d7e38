"""CD2-pFed: the cut, the two halves' disagreement, the growing private share, and its two ends: fedavg and
local."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.core.flat import Wire
from holdfast.core.registry import build
from holdfast.local.client import Local, Received
from holdfast.local.fit import Recipe
from holdfast.local.plan import Plan
from holdfast.models.channels import channels
from holdfast.models.network import Network
from holdfast.results.run import Run
from tests.checks.method_cases import hard
from tests.helpers import assert_same, client_keys, deal, everything, samples_of
from tests.methods.by_hand import both_plans, close

Simulate = Callable[..., Run]
SAMPLES = samples_of(torch.tensor([[1.0], [2.0], [-1.0]]), torch.tensor([0, 1, 1]))


class Body(nn.Module):
    """Two features of one number, two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


NETWORK = Network(Body, "head", "cd2 by hand", torch.float64)
START = torch.tensor([0.5, -0.3, 0.2, 0.7, -0.4, 0.1], dtype=torch.float64)  # body, head row by row


def method_of(**settings: Any) -> Any:
    return build("method", {"name": "cd2-pfed", **settings})


def changed(name: str, **settings: Any) -> dict[str, Any]:
    table = hard(name)
    table["method"] |= settings
    return table


def test_the_first_channels_are_shared_and_the_last_private() -> None:
    network = Network(lambda: nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)), None, "cut", torch.float64)
    shared = channels(network, 0.5)
    views = network.layout.unflatten(shared)
    assert views["0.weight"].tolist() == [[True, True], [True, True], [False, False], [False, False]]
    assert all(
        views[name].tolist() == [True, True, False, False]
        for name in ("0.bias", "1.weight", "1.bias", "1.running_mean")
    )
    assert bool(views["1.num_batches_tracked"])
    assert bool(channels(network, 1.0).all()) and int(channels(network, 0.0).sum()) == 1


def test_of_words_the_vectors_are_cut_and_not_the_vocabulary() -> None:
    """Every word is known to both halves, by half of its vector."""
    network = Network(
        lambda: nn.Sequential(nn.Embedding(3, 4), nn.ConvTranspose1d(1, 2, 3, bias=False)),
        None,
        "words",
        torch.float64,
    )
    views = network.layout.unflatten(channels(network, 0.5))
    assert views["0.weight"].tolist() == [[True, True, False, False]] * 3
    assert views["1.weight"].tolist() == [[[True] * 3, [False] * 3]]
    method = method_of()
    halves = method.Client(method)._halves(SimpleNamespace(network=network, round=1))
    assert halves["private.0.weight"].tolist() == [[False, False, True, True]] and halves[
        "private.1.weight"
    ].shape == (1, 2, 1)


@both_plans
@pytest.mark.parametrize("lam", [0.0, 0.8])
def test_a_step_against_autograd(plan: Plan, lam: float) -> None:
    """Feature 0 is shared, feature 1 private; each half answers by the whole head from its own feature."""
    method = method_of()
    rule = method.Client(method)
    wire = Wire.of(NETWORK.layout, rule.shared(NETWORK, 1))
    assert wire.index.tolist() == [0, 2, 3]  # the first feature, and the first class of the head
    local = Local(
        network=NETWORK,
        wire=wire,
        ids=torch.tensor([4, 7]),
        key=client_keys(2),
        samples=SAMPLES,
        data=deal(SAMPLES, [2, 1]),
        validation=deal(SAMPLES, [0, 0]),
        initial=START.repeat(2, 1),
        plan=plan,
        recipe=Recipe(lr=0.1, epochs=1, batch_size=2),
        round=1,
        settings=SimpleNamespace(lam=torch.full((2,), lam, dtype=torch.float64)),
        selected=torch.ones(2, dtype=torch.bool),
    )
    got = Received(
        torch.tensor([[0.6, 0.2, 0.7]], dtype=torch.float64), torch.zeros(2, 1, dtype=torch.int64), wire
    )
    state, sent = rule.train(local, rule.init(local), got, {})
    for i, (x, y) in enumerate((([1.0, 2.0], [0, 1]), ([-1.0], [1]))):
        w = torch.tensor([0.6, *START[1:].tolist()], dtype=torch.float64, requires_grad=True)
        features, head = torch.tensor(x, dtype=torch.float64)[:, None] * w[:2], w[2:].view(2, 2)
        halves = [
            F.log_softmax((features * torch.tensor(mask)) @ head.T, 1) for mask in ([0.0, 1.0], [1.0, 0.0])
        ]
        apart = sum(
            F.kl_div(a, b, log_target=True, reduction="none").sum(1) for a, b in (halves, halves[::-1])
        )
        (grad,) = torch.autograd.grad(
            (F.cross_entropy(features @ head.T, torch.tensor(y), reduction="none") + lam * apart).mean(), [w]
        )
        close(state["own"][i], (w - 0.1 * grad).tolist())
        close(sent["update"][i], (-0.1 * grad)[[0, 2, 3]].tolist())


def test_without_a_head_every_layer_is_cut() -> None:
    """Then the halves answer for their own classes alone, and still teach each other."""
    method = method_of()
    rule = method.Client(method)
    network = Network(Body, None, "cd2 without a head", torch.float64)
    halves = rule._halves(SimpleNamespace(network=network, round=1))
    assert {name: half.tolist() for name, half in halves.items()} == {
        "private.body.weight": [[False], [True]],
        "private.head.weight": [[False], [True]],
    }


def test_all_shared_is_fedavg(simulate: Simulate) -> None:
    cut, fedavg = (everything(simulate(**table)) for table in (changed("cd2-pfed", rho=0.0), hard("fedavg")))
    torch.testing.assert_close(cut["server/model"], fedavg["server/model"], rtol=0, atol=1e-12)


def test_all_private_is_local(simulate: Simulate) -> None:
    """A network without counters: then nothing at all travels."""
    tables = (changed("cd2-pfed", rho=1.0), hard("local"))
    runs = [simulate(**{**table, "model": {"name": "mlp", "hidden": 6}}) for table in tables]
    cut, local = (everything(run)["rows/own"] for run in runs)
    torch.testing.assert_close(cut, local, rtol=0, atol=1e-12)
    assert runs[0].final["bytes/down"] == 0


def test_running_statistics_are_those_of_the_whole_network(simulate: Simulate) -> None:
    """The two more passes of each step leave no trace: after one round of two epochs, a client has counted
    its own steps once."""
    run = simulate(**{**hard("cd2-pfed"), "train": {**hard("x")["train"], "rounds": 1, "participation": 1.0}})
    layout, own = run._experiment.network.layout, everything(run)["rows/own"]
    counter = next(slot.start for slot in layout.slots if slot.name.endswith("num_batches_tracked"))
    steps = 2 * -(-run._experiment.federation.train.counts // 5)
    assert own[:, counter].tolist() == steps.tolist()


@pytest.mark.parametrize("aggregator", ["mean", "centered-clip", "foolsgold"])
def test_a_growing_private_share(aggregator: str, simulate: Simulate) -> None:
    """rho / 3, 2 rho / 3, rho, rho: what travels shrinks, and so does what the server and its rule
    remember."""
    table = changed("cd2-pfed", rho=0.75, grow=3)
    table |= {"model": {"name": "mlp", "hidden": 8}, "aggregator": aggregator}
    table["train"] |= {"rounds": 4, "participation": 1.0}
    run = simulate(**table)
    layout, sizes = run._experiment.network.layout, []
    for share in (0.25, 0.5, 0.75, 0.75):
        sizes.append(int(channels(run._experiment.network, 1 - share).sum()))
    assert list(run.metrics["bytes/down"]) == [5 * 8 * size for size in sizes]
    state = run.state()
    assert state["model"].shape == state["index"].shape == (sizes[-1],) and sizes[0] > sizes[1] > sizes[2]
    assert not any(value.ndim and value.shape[-1] == layout.size for value in state.values())
    assert 0 <= run.final["accuracy"] <= 1
    again = simulate(**{**table, "engine": {"plan": "loop"}})
    assert_same(everything(run), everything(again), 1e-10)
