"""IBA: what its network draws, which coordinates are trained, and what it is measured with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast.attacks.iba import IBA, fresh, limits, triggered
from holdfast.core.errors import ConfigError
from holdfast.data.federation import Samples
from holdfast.results.run import Run
from tests.attacks.own_case import NETWORK, SAMPLES, crew_of, own_of
from tests.helpers import samples_of


def test_what_it_draws_by_hand() -> None:
    """One channel and weights in the middle of the kernels alone: every pixel by itself."""
    g = {name: torch.zeros_like(value) for name, value in fresh(1, 1).items()}
    g["in_weight"][0, 0, 1, 1], g["out_weight"][0, 0, 1, 1], g["out_bias"][0] = 2.0, 1.0, -1.0
    g |= {"low": torch.zeros(1, 1, 1), "high": torch.full((1, 1, 1), 4.0)}
    x = torch.tensor([0.0, 0.5, 1.0, 4.0]).view(1, 1, 2, 2)
    drawn = triggered(x, g, 0.25).flatten()
    expected = torch.tensor([0.0, 0.5, 1 + torch.tanh(torch.tensor(1.0)), 4.0])
    torch.testing.assert_close(drawn, expected)  # -tanh(1) is cut at 0, tanh(7) at 4


def test_the_range_of_the_data() -> None:
    bytes_ = Samples(
        torch.zeros(1, 2, 3, 3, dtype=torch.uint8), torch.zeros(1).long(), 2, 1, (0.5, 0.25), (0.5, 0.25)
    )
    found = limits(bytes_)
    assert found["low"].flatten().tolist() == [-1, -1] and found["high"].flatten().tolist() == [1, 3]
    floats = samples_of(torch.arange(4.0).view(1, 1, 2, 2), torch.zeros(1).long(), 2)
    assert {name: float(value) for name, value in limits(floats).items()} == {"low": 0, "high": 3}


def test_only_coordinates_with_the_least_score_are_trained() -> None:
    score = torch.linspace(1, 0, NETWORK.layout.size, dtype=torch.float64).expand(2, -1)
    mask = IBA(share=0.25)._trained(own_of({"score": score}))
    assert mask[0].nonzero().flatten().tolist() == list(range(24, 31))
    assert bool(IBA()._trained(own_of()).all())


def test_its_leader_hands_on_the_mean_network_and_remembers_it() -> None:
    attack, before = IBA(share=0.5), {"sent": torch.tensor([1.0, 2.0]), "in_bias": torch.ones(8)}
    crew = crew_of(attack, torch.tensor([[3.0, 1.0]]), before)
    steps = attack.lead(crew)
    asked = next(steps)
    assert asked.task == "draw" and asked.shared.keys() == {"in_bias"}
    each = {name: torch.stack([value, value + 2]) for name, value in fresh(1, 8).items()}
    second = steps.send(each)  # type: ignore[arg-type]
    assert second.shared["score"].tolist() == [6.0, -1.0]
    for name, value in fresh(1, 8).items():
        torch.testing.assert_close(second.shared[name], value + 1)
        assert torch.equal(crew.memory.fresh[name], second.shared[name])


@pytest.mark.parametrize(
    ("samples", "settings", "said"),
    [
        (SAMPLES, {}, "draws into images, but a sample"),
        (
            samples_of(torch.zeros(1, 1, 2, 2), torch.zeros(1).long(), 2),
            {"target": 2},
            "classes 0 to 1, got 2",
        ),
    ],
)
def test_other_data_is_refused(samples: Samples, settings: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        IBA(**settings).moving(samples)


def test_its_network_is_trained_and_measured(simulate: Callable[..., Run]) -> None:
    table = {
        "method": "fedavg",
        "attack": {"name": "iba", "fraction": 0.4, "channels": 2},
        "train": {"rounds": 2, "lr": 0.1},
    }
    run = simulate(**table)
    head = run.store.head()
    assert head is not None
    for name, value in fresh(1, 2).items():
        assert not torch.equal(head[1][f"attack/all/{name}"].float(), value), name
    other = simulate(**{**table, "attack": {**table["attack"], "test_epsilon": 0.001}})  # type: ignore[dict-item]
    assert torch.equal(run.vector(), other.vector())
    assert run.final["attack/asr"] != other.final["attack/asr"]
