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
NOISY = {"name": "weak-dp", "noise": 0.01}


def test_the_rule_sees_short_updates_and_the_model_gets_the_noise() -> None:
    look = Look(seen=[])
    rule, ctx = WeakDP(norm=0.5, unit="absolute", noise=0.1)(look), context_of(X)
    rule(X, torch.full((3,), 1 / 3), {}, ctx)
    torch.testing.assert_close(look.seen[0][0], torch.tensor([[0.3, 0.4], [0.0, 0.5], [0.0, -0.5]]))
    model = torch.zeros(20_000)
    noise = rule.after_step(model, ctx)
    assert abs(float(noise.mean())) < 0.003 and abs(float(noise.std()) - 0.1) < 0.003
    assert torch.equal(noise, rule.after_step(model, ctx)) and not model.any()


def test_every_round_has_noise_of_its_own() -> None:
    one, other = (gaussian(Key(0).fold(round), torch.zeros(5), 1.0) for round in (1, 2))
    assert not torch.equal(one, other)


def test_a_model_differs_by_the_noise_alone_from_one_of_clipped_updates(tmp_path: Path) -> None:
    """Also where the server has an optimiser, and within a wrapper that looks at groups of coordinates."""
    tables = [
        {
            "aggregator": {"name": "mean", "f": 1, "wrap": wrap},
            "server": "fedadam",
            "train": {"rounds": 1},
        }
        for wrap in (["clip"], [NOISY], ["clip", "gas"], [NOISY, "gas"])
    ]
    clip, noisy, grouped, noisy_groups = (run.state()["model"] for run in run_all(tables, tmp_path))
    noise = noisy - clip
    assert 0.005 < float(noise.std()) < 0.02
    torch.testing.assert_close(noisy_groups - grouped, noise, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_the_papers_claim_clipping_ends_a_boosted_backdoor_and_noise_costs_little(tmp_path: Path) -> None:
    """Sun et al., section 4: norm clipping mitigates the attack, and so does clipping with noise, at little
    cost in accuracy. That noise helps beyond clipping does not show here."""
    from tests.defence_plays import BOOSTED, played

    wraps: list[list[object]] = [[], ["clip"], [NOISY]]
    bare, clipped, noisy = played(tmp_path, [{"name": "mean", "wrap": wrap} for wrap in wraps], BOOSTED)
    assert bare["attack/asr"] > 0.9 and clipped["attack/asr"] < 0.3
    assert noisy["attack/asr"] < 0.3 and noisy["accuracy"] > bare["accuracy"] - 0.05
