from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holdfast.aggregators.base import Reduced
from holdfast.aggregators.freqfed import cosine_transform, low_frequencies
from holdfast.core.flat import Layout
from holdfast.core.keys import Key
from holdfast.core.registry import build
from tests.checks.aggregator_cases import context_of

scipy_fft = pytest.importorskip("scipy.fft")
LAYER = Layout.of(nn.Linear(2, 2))  # a matrix of 2 x 2, and 2 biases


def apply(x: Tensor, received: Tensor | None = None, **settings: object) -> Reduced:
    rule = build("aggregator", {"name": "freqfed", "f": 1, **settings})
    ctx = replace(context_of(x, assumed=1), layout=LAYER)
    ctx = ctx if received is None else replace(ctx, received=received)
    return rule(x, torch.full((len(x),), 1 / len(x), dtype=x.dtype), {}, ctx)


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_the_transform_is_the_orthonormal_one_of_type_two(size: int) -> None:
    x = Key(size).normal(3, size, dtype=torch.float64)
    torch.testing.assert_close(
        cosine_transform(x), torch.as_tensor(scipy_fft.dct(x.numpy(), norm="ortho")), rtol=0, atol=1e-12
    )


def test_low_frequencies_by_hand() -> None:
    """Of the matrix the sum over 2, of the biases the sum over the root of 2; with 1.5 all but one."""
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 7.0]], dtype=torch.float64)
    expected = torch.tensor([[5.0, 12 / 2**0.5]], dtype=torch.float64)
    torch.testing.assert_close(low_frequencies(x, LAYER, 0.5), expected)
    assert low_frequencies(x, LAYER, 1.0).shape == (1, 5)  # all but the highest of the matrix


def test_low_frequencies_against_a_slow_reference() -> None:
    """A convolution counts as a matrix with a row for each filter."""
    layout = Layout.of(nn.Conv2d(2, 4, 3))
    x = Key(2).normal(3, layout.size, dtype=torch.float64)
    for row, found in zip(x.numpy(), low_frequencies(x, layout, 0.7), strict=True):
        slow = []
        for part, shape in ((row[:72], (4, 18)), (row[72:], (1, 4))):
            turned = scipy_fft.dctn(part.reshape(shape), norm="ortho")
            for i in range(shape[0]):
                for j in range(shape[1]):
                    if i / shape[0] + j / shape[1] < 0.7:
                        slow.append(turned[i, j])
        torch.testing.assert_close(found, torch.as_tensor(np.array(slow)), rtol=0, atol=1e-12)


def test_the_majority_that_agrees_in_the_low_frequencies_is_averaged() -> None:
    jitter = 0.01 * Key(3).normal(6, 6, dtype=torch.float64)
    x = torch.ones(6, 6, dtype=torch.float64) + jitter
    x[4:] = -x[4:]
    got = apply(x, of="update")
    assert set(got.weights[4:].tolist()) == {0.0} and got.weights[:4].sum() == pytest.approx(1.0)
    torch.testing.assert_close(got.value, got.weights @ x)
    high = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    hidden = torch.ones(6, 6, dtype=torch.float64)
    hidden[5] += 100 * high
    assert apply(hidden, of="update").weights[5] > 0  # what is in the high frequencies passes


def test_models_are_compared_as_updates_added_to_the_model_sent() -> None:
    x = Key(5).normal(5, 6, dtype=torch.float64)
    x[4] = -50.0
    sent = torch.full((6,), 2.0, dtype=torch.float64)
    of_models, of_updates = apply(x, sent).weights, apply(x + sent, of="update").weights
    assert torch.equal(of_models, of_updates) and of_models[4] == 0


def test_without_a_majority_the_median_answers() -> None:
    x = torch.zeros(4, 6, dtype=torch.float64)
    x[0, 0], x[1, 4], x[2, 0], x[3, 4] = 1.0, 1.0, -1.0, -1.0
    got = apply(x, of="update")
    assert not got.value.any() and (got.fallback or got.weights.sum() == pytest.approx(1.0))
    assert apply(x[:2]).fallback


@pytest.mark.slow
def test_the_papers_claim_holds_for_even_data_and_boosted_updates_and_not_for_skewed_data(
    tmp_path: Path,
) -> None:
    """Fereidooni et al., section VI: backdoors are kept out, whatever the distribution of the data. So it is
    with equal shares of all classes, and for boosted updates; not for plain ones beside skewed labels."""
    from tests.defence_plays import BOOSTED, EVEN, PATCH, SKEWED, played

    rules = ["mean", {"name": "freqfed", "f": 0.3}]
    for place, (attack, partition, kept_out) in enumerate(
        [(PATCH, EVEN, True), (BOOSTED, SKEWED, True), (PATCH, SKEWED, False)]
    ):
        mean, found = played(tmp_path / str(place), rules, attack, partition)
        assert mean["attack/asr"] > 0.9 and (found["attack/asr"] < 0.2) == kept_out
        assert found["accuracy"] > 0.85 and found["fallback_rounds"] == 0
