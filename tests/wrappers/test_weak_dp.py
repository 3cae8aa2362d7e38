from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.core.keys import Key
from holdfast.wrappers.weak_dp import WeakDP, gaussian
from tests.checks.aggregator_cases import context_of
from tests.helpers import run_all
from tests.wrappers.recording_aggregator import Look

X = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, -2.0]])


def test_the_rule_sees_short_updates_and_the_model_gets_the_noise() -> None:
    look = Look(seen=[])
    rule = WeakDP(norm=0.5, unit="absolute", noise=0.1)(look)
    ctx = context_of(X)
    rule(X, torch.full((3,), 1 / 3), {}, ctx)
    torch.testing.assert_close(look.seen[0][0], torch.tensor([[0.3, 0.4], [0.0, 0.5], [0.0, -0.5]]))
    model = torch.zeros(20_000)
    noise = rule.after_step(model, ctx)
    assert abs(float(noise.mean())) < 0.003 and abs(float(noise.std()) - 0.1) < 0.003
    assert torch.equal(noise, rule.after_step(model, ctx)) and not model.any()


def test_every_round_has_noise_of_its_own() -> None:
    one, other = (gaussian(Key(0).fold(round), torch.zeros(5), 1.0) for round in (1, 2))
    assert not torch.equal(one, other)


def test_the_noise_is_all_that_a_run_has_more_than_one_with_clipped_updates(tmp_path: Path) -> None:
    """Also where the server has an optimiser, and inside a wrapper that looks at groups of coordinates only."""
    wraps = [["clip"], [{"name": "weak-dp", "noise": 0.01}], [{"name": "weak-dp", "noise": 0.01}, "gas"], ["clip", "gas"]]
    tables = [
        {
            "aggregator": {"name": "mean", "f": 1, "wrap": wrap},
            "server": "fedadam",
            "train": {"rounds": 1, "dtype": "float64"},
        }
        for wrap in wraps
    ]
    clip, noisy, grouped, groups = (run.state()["model"] for run in run_all(tables, tmp_path))
    noise = noisy - clip
    assert 0.005 < float(noise.std()) < 0.02
    torch.testing.assert_close(grouped - groups, noise, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_noise_and_clipping_keep_a_backdoor_out(tmp_path: Path) -> None:
    """Sun et al., Figure 4: norm clipping and a little noise nearly end a backdoor by boosted updates, and cost
    little accuracy."""
    from tests.plays import backdoored

    bare, clipped, noisy = backdoored(
        tmp_path,
        [],
        [{"name": "clip", "norm": 1.0}],
        [{"name": "weak-dp", "norm": 1.0, "noise": 0.01}],
        attack={"name": "backdoor", "clients": (3,), "scale": 20.0},
    )
    assert bare["asr"] > 0.8
    assert noisy["asr"] < 0.3 and noisy["accuracy"] > bare["accuracy"] - 0.05
