from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from holdfast.aggregators.deepsight import DeepSight
from holdfast.aggregators.inspection import (
    Inspection,
    division_differences,
    normalised_energies,
    output_layer,
    threshold_exceedings,
)
from holdfast.aggregators.normality import Models
from holdfast.core.errors import ConfigError
from holdfast.core.flat import Layout, Wire
from holdfast.core.keys import Key
from holdfast.data.hashed_words import HASHES
from holdfast.evaluation.probe import Probe
from holdfast.models.backbone_head import BackboneHead
from holdfast.models.network import Network
from holdfast.results.run import Run
from tests.checks.aggregator_cases import context_of
from tests.detectors.judging import BACKDOOR, IID, SKEWED, excluded, play
from tests.helpers import network_of
from tests.pretended_gpu import pretended_gpu

LAYOUT = Layout.of(BackboneHead(nn.Linear(1, 2, bias=False), nn.Linear(2, 4)), "head")
"""Two numbers of the backbone, then eight weights (two for each of four classes) and four biases."""
TAME, ABOUT_ONE = [1.0, 1, 1, 1], [4.0, 0, 0, 0]


def update(energies: list[float]) -> list[float]:
    """An update of the head in which the outputs have these energies: half in a weight, half in the bias."""
    weights = [part for e in energies for part in (e / 2, 0.0)]
    return [0.0, 0.0, *weights, *(e / 2 for e in energies)]


def seen(rows: list[list[float]]) -> Models:
    x = torch.tensor(rows, dtype=torch.float64)
    return Models(x, torch.arange(len(x)), torch.zeros(x.shape[1], dtype=torch.float64), LAYOUT)


def test_energies_and_exceedings_by_hand() -> None:
    """Energies 4, 2, 1 and 0.5: squares 16, 4, 1 and 0.25 of 21.25; those of 4 or more (a quarter of 16)
    exceed."""
    models = seen([update([4.0, 2, 1, 0.5]), update(TAME), update([0.0] * 4)])
    found = normalised_energies(models, *output_layer(LAYOUT, "this"))
    torch.testing.assert_close(found[0], torch.tensor([16, 4, 1, 0.25], dtype=torch.float64) / 21.25)
    assert found[1:].tolist() == [[0.25] * 4] * 2
    assert threshold_exceedings(found).tolist() == [2, 4, 4]


def test_a_cluster_about_one_class_is_left_out() -> None:
    rows = [update(TAME), update(TAME), update(TAME), update(ABOUT_ONE), update(ABOUT_ONE)]
    found = Inspection(samples=0).inspect(seen(rows), None, Key(0), "this")
    assert found.exceedings.tolist() == [4, 4, 4, 1, 1]
    assert found.accepted.tolist() == [True] * 3 + [False] * 2 and found.poisoned.tolist() == [0, 0, 0, 1, 1]


def test_a_cluster_is_judged_as_a_whole_by_tau() -> None:
    """One of four much alike looks poisoned: its energies are just below a half of the largest, so their
    squares are below a quarter. That is less than a third, and more than a fifth, of its cluster."""
    first, second, edge = [1.0, 0.5, 0.5, 0.5], [0.5, 1.0, 0.5, 0.5], [1.0, 0.499, 0.499, 0.499]
    rows = [update(each) for each in (first, first, first, edge, second, second, second)]
    for tau, stay in ((1 / 3, True), (0.2, False)):
        found = Inspection(samples=0, tau=tau).inspect(seen(rows), None, Key(0), "this")
        assert found.exceedings.tolist() == [4, 4, 4, 1, 4, 4, 4]
        assert found.poisoned.tolist() == [0.25] * 4 + [0] * 3
        assert found.accepted.tolist() == [stay] * 4 + [True] * 3


def test_the_aggregate_by_hand() -> None:
    rows = [[2 * v for v in update(TAME)], update(TAME), update(TAME), update(ABOUT_ONE), update(ABOUT_ONE)]
    x = torch.tensor(rows, dtype=torch.float64)
    w = torch.full((5,), 0.2, dtype=torch.float64)
    ctx = replace(context_of(x), layout=LAYOUT)
    got = DeepSight()(x, w, {}, ctx)  # lengths 2.83, 1.41, 1.41, 2.83 and 2.83: the first is not shortened
    torch.testing.assert_close(got.weights, torch.tensor([1, 1, 1, 0, 0], dtype=torch.float64) / 3)
    torch.testing.assert_close(got.value, torch.tensor(update(TAME), dtype=torch.float64) * 4 / 3)


class Table(nn.Module):
    """One logit for each class and input: a row of a matrix times the input."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def probe_of(network: Network, shape: tuple[int, ...], words: bool = False) -> Probe:
    wire = Wire.of(network.layout, torch.ones(network.layout.size, dtype=torch.bool))
    initial = network.initial(Key(0))
    return Probe(network, shape, words, wire, initial)


def test_division_differences_against_the_slow_reference() -> None:
    network = network_of(Table)
    probe, key, n = probe_of(network, (2,)), Key(5), 3
    reference = network.initial(Key(1))
    rows = reference + Key(2).normal(n, 9, dtype=torch.float64)
    layout = network.layout
    models = Models(rows, torch.arange(n), reference, layout, to_change=-reference)
    found = division_differences(models, probe, 1500, key)
    xs = torch.cat(list(probe.inputs(key, 1500)))
    assert xs.shape == (1500, 2) and 0 <= float(xs.min()) and float(xs.max()) < 1

    def shares(vector: Tensor) -> Tensor:
        return torch.softmax(xs @ vector[:6].view(3, 2).T + vector[6:], dim=1)

    for row in range(n):
        torch.testing.assert_close(found[row], (shares(rows[row]) / shares(reference)).mean(dim=0))
    with pretended_gpu() as gpu:  # what clients sent is there, the network is not
        far = Models(rows.to(gpu.device), torch.arange(n), reference.to(gpu.device), layout)
        there = division_differences(far, probe, 1500, key)
        assert there.device == gpu.device
        with gpu.not_counted():
            torch.testing.assert_close(there.cpu(), found)


def test_words_are_drawn_from_the_rows_of_the_table() -> None:
    class Texts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(7, 2), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.words(x).mean(1))

    probe = probe_of(network_of(Texts), (4,), words=True)
    (xs,) = probe.inputs(Key(3), 200)
    assert xs.unique().tolist() == [1, 2, 3, 4, 5, 6] and xs.dtype == torch.int64
    assert probe.log_shares(probe.initial, None, xs).exp().sum(dim=1).allclose(torch.ones(200).double())
    (xs,) = probe_of(network_of(Table), (4,), words=True).inputs(Key(3), 200)
    assert 1 <= int(xs.min()) and HASHES // 2 < int(xs.max()) <= HASHES


def test_without_the_output_layer_it_is_refused(simulate: Callable[..., Run]) -> None:
    for part in ({"aggregator": "deepsight"}, {"detectors": ["deepsight"]}):
        with pytest.raises(ConfigError, match="deepsight'?: the output layer does not travel in this method"):
            simulate(method="fedper", **part)


def test_a_part_of_the_model_and_buffers(simulate: Callable[..., Run]) -> None:
    """Only BatchNorm stays with the clients; and with all of it travelling."""
    for method in ("fedbn", "fedavg"):
        run = simulate(
            method=method,
            model={"name": "mlp", "hidden": 6, "batch_norm": True},
            aggregator={"name": "deepsight", "samples": 30},
            train={"rounds": 1},
        )
        assert run.final["accuracy"] is not None and run.round == 1


@pytest.mark.slow
def test_backdoors_are_told_from_unusual_clients(simulate: Callable[..., Run]) -> None:
    """The paper: models trained on a backdoor are told from honest ones that are trained on few classes. With
    skewed labels it holds for most of both."""
    detectors = [{"name": "deepsight", "samples": 200}]
    for partition, caught, wronged in ((IID, 0.99, 0.03), (SKEWED, 0.85, 0.2)):
        run = simulate(**play(partition, detectors=detectors, attack=BACKDOOR))
        attackers, honest = excluded(run)
        assert attackers >= caught and honest <= wronged and run.final["attack/asr"] < 0.15
