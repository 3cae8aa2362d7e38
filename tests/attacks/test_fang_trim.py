"""Fang's attack on the trimmed mean and the median: by hand, and its claim in small."""

from __future__ import annotations

import pytest
import torch

from tests.attacks.played import SimulateAll, kept
from tests.attacks.test_updates import HONEST, sent


def assert_within(values: torch.Tensor, low: list[float], high: list[float]) -> None:
    assert bool((values >= torch.tensor(low) - 1e-9).all()) and bool(
        (values <= torch.tensor(high) + 1e-9).all()
    )


def test_full_knowledge_is_just_below_all_benign_models() -> None:
    """The mean update is (0.5, 3), so both models grow; the benign ones, (1, 3) with the updates (1, 0) and
    (0, 2), are (2, 3) and (1, 5). Halves of the smallest are (0.5, 1.5): updates of -0.5 to 0 and -1.5 to
    0."""
    rows = sent("fang-trim")
    assert_within(rows, [-0.5, -1.5], [0.0, 0.0])
    assert len(rows.flatten().unique()) == 4  # every attacker and coordinate has a draw of its own
    far = sent("fang-trim", b=4.0)
    edge = torch.tensor([0.0, 0.0], dtype=torch.float64)
    reach = torch.tensor([[1.0, 3.0]], dtype=torch.float64)  # the smallest benign models
    torch.testing.assert_close((far - edge) / (reach * 0.75), (rows - edge) / (reach * 0.5))


def test_the_released_code_takes_factors_on_updates() -> None:
    """The smallest updates of all clients are (-2, 0): between twice that and that."""
    rows = sent("fang-trim", variant="authors")
    assert_within(rows, [-4.0, 0.0], [-2.0, 0.0])


def test_partial_knowledge_is_three_to_four_spreads_away() -> None:
    """Of (3, 4) and (-2, 6): mean (0.5, 5), spread (sqrt(12.5), sqrt(2))."""
    mean, spread = HONEST[[1, 3]].mean(0), HONEST[[1, 3]].std(0)
    share = (mean - sent("fang-trim", knows="colluders")) / spread
    assert_within(share, [3.0, 3.0], [4.0, 4.0])
    population = (mean - sent("fang-trim", knows="colluders", variant="authors")) / spread
    torch.testing.assert_close(population, share * 0.5**0.5)


@pytest.mark.slow
def test_it_hurts_more_than_noise_does(simulate_all: SimulateAll) -> None:
    """The paper's claim against the trimmed mean and the median, also with partial knowledge: noise does not
    hurt them, this attack does (0.82 and 0.46 of seed 0 on the trimmed mean)."""
    rules = [{"name": rule, "f": 4} for rule in ("trimmed-mean", "median")]
    attacks = ["gaussian", "fang-trim", {"name": "fang-trim", "knows": "colluders"}]
    found = kept(simulate_all, [(rule, attack) for rule in rules for attack in attacks])
    for noise, full, partial in (found[:3], found[3:]):
        assert max(full, partial) < noise - 0.1
