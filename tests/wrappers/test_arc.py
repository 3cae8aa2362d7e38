from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.aggregators.mean import Mean
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.wrappers.arc import AdaptiveRobustClipping
from tests.checks.aggregator_cases import context_of
from tests.helpers import run_all
from tests.wrappers.recording_aggregator import Look


def clipped(x: torch.Tensor, f: int) -> torch.Tensor:
    look = Look(seen=[], f=f)
    AdaptiveRobustClipping()(look)(x, torch.full((len(x),), 1 / len(x)), {}, context_of(x, assumed=f))
    return look.seen[0][0]


def test_by_hand() -> None:
    """Lengths 5, 4, 3, 2, 1 with f = 1: floor(2 * 1 * 4 / 5) = 1 is shortened, to 4; with f = 2,
    floor(2 * 2 * 3 / 5) = 2 are, to 3."""
    x = torch.diag(torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0]))
    assert clipped(x, 1).diagonal().tolist() == [4, 4, 3, 2, 1]
    assert clipped(x, 2).diagonal().tolist() == [3, 3, 3, 2, 1]
    assert torch.equal(clipped(x, 0), x)


def test_the_example_of_byzfl() -> None:
    x = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
    expected = torch.tensor([[1.0, 2, 3], [4, 5, 6], [4.4100, 5.0400, 5.6701]])
    torch.testing.assert_close(clipped(x, 1), expected, rtol=0, atol=1e-4)


def test_absurd_lengths_and_no_lengths() -> None:
    huge = torch.tensor([[1e30, 1e30], [0.0, 1.0], [1.0, 0.0], [0.0, 0.5]])
    assert clipped(huge, 1).norm(dim=1).tolist() == pytest.approx([1, 1, 1, 0.5])
    assert torch.equal(clipped(torch.zeros(3, 2), 1), torch.zeros(3, 2))


def test_too_few_clients_fall_back_to_the_median() -> None:
    x = torch.tensor([[0.0], [1.0], [9.0], [50.0]])
    found = AdaptiveRobustClipping()(Mean(f=2))(x, torch.full((4,), 0.25), {}, context_of(x, assumed=2))
    assert found.fallback and found.value.tolist() == [5.0]
    with pytest.raises(ConfigError, match="wrapper 'arc' needs f"):
        AdaptiveRobustClipping()(Mean())


def test_no_attack_makes_the_mean_longer_than_the_longest_honest_update() -> None:
    """The paper's property of bounded output, which holds for any rule inside, and which the
    mean alone does not have."""
    for f in range(1, 7):
        for size in (1.0, 1e3, 1e12):
            x = Key(f).normal(13, 8, dtype=torch.float64)
            honest = float(x[f:].norm(dim=1).max())
            x[:f] = size * Key(f).fold("attack").normal(8, dtype=torch.float64)
            rule = AdaptiveRobustClipping()(Mean(f=f))
            got = rule(x, torch.full((13,), 1 / 13, dtype=torch.float64), {}, context_of(x, assumed=f))
            assert float(got.value.norm()) <= honest * (1 + 1e-12) and not got.fallback


@pytest.mark.slow
def test_it_helps_where_clients_differ_much(tmp_path: Path) -> None:
    """The paper's main claim: around mixing and the trimmed mean, ARC makes robust gradient descent more
    accurate where data differ extremely, and a fixed bound does not. Three of twelve attackers; where data
    differ less (Dirichlet 0.3), it gained 0.06 under `ipm` and lost 0.02 under `label-flip`."""
    table = {
        "data": {
            "name": "digits",
            "clients": 12,
            "partition": {"name": "dirichlet", "beta": 0.05, "min_samples": 4},
        },
        "model": {"name": "mlp", "hidden": 32},
        "train": {"rounds": 150, "local_steps": 1, "batch_size": 50, "lr": 0.3, "dtype": "float32"},
        "evaluate": {"every": 150},
    }
    wraps = {"none": [], "clip": [{"name": "clip", "norm": 0.1, "unit": "absolute"}], "arc": ["arc"]}
    for attack in ({"name": "ipm", "eps": 5.0}, {"name": "label-flip", "flip": "mirrored"}):
        cells = [
            {
                **table,
                "attack": {**attack, "fraction": 0.25},
                "aggregator": {"name": "trimmed-mean", "f": 0.25, "wrap": ["nnm", *wrap]},
                "seed": seed,
            }
            for wrap in wraps.values()
            for seed in (0, 1)
        ]
        runs = run_all(cells, tmp_path / attack["name"])
        found = [sum(run.final["accuracy"] for run in runs[i : i + 2]) / 2 for i in (0, 2, 4)]
        assert found[2] > found[0] + 0.05 and found[2] > found[1] + 0.05, (attack, found)
