"""Clipping, noise and epsilon."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("opacus", reason="the accountant needs opacus: pip install 'holdfast[privacy]'")

from holdfast.core.errors import RunError  # noqa: E402
from holdfast.core.keys import Key  # noqa: E402
from holdfast.privacy.accounting import epsilon_of  # noqa: E402
from holdfast.privacy.protection import keyed_normal, noised, secure_normal  # noqa: E402
from tests.pretended_gpu import pretended_gpu  # noqa: E402


def test_a_long_update_is_shortened_as_a_whole_and_a_short_one_is_not() -> None:
    long = noised({"a": torch.tensor([[3.0]]), "b": torch.tensor([[0.0, 4.0]])}, clip=1.0, noise=0.0)
    assert torch.allclose(long["a"], torch.tensor([[0.6]])) and torch.allclose(
        long["b"], torch.tensor([[0.0, 0.8]])
    )
    short = noised({"a": torch.tensor([[0.3, 0.4]])}, clip=1.0, noise=0.0)
    assert torch.equal(short["a"], torch.tensor([[0.3, 0.4]])) and short["a"].dtype == torch.float32
    assert torch.equal(noised({"a": torch.zeros(1, 3)}, 1.0, 0.0)["a"], torch.zeros(1, 3))
    with pytest.raises(RunError, match="not finite; nothing is sent"):
        noised({"a": torch.tensor([[float("nan")]])}, 1.0, 1.0)


def test_noise_is_gaussian_of_the_right_size_and_never_the_same() -> None:
    """Bounds of eight deviations of the estimates: they fail once in 10^14 times."""
    n = 200_001
    drawn = noised({"a": torch.zeros(1, n)}, clip=2.0, noise=1.5)["a"][0].double() / 3.0
    assert abs(float(drawn.mean())) < 8 / math.sqrt(n) and abs(float(drawn.var()) - 1) < 8 * math.sqrt(2 / n)
    for at in (-2.0, -0.5, 0.5, 2.0):
        share, exact = float((drawn < at).double().mean()), 0.5 * (1 + math.erf(at / math.sqrt(2)))
        assert abs(share - exact) < 8 * math.sqrt(exact * (1 - exact) / n)
    halves = drawn[: n // 2], drawn[n // 2 : n - 1]  # both come from the same pairs
    assert abs(float((halves[0] * halves[1]).mean())) < 8 / math.sqrt(n // 2)
    torch.manual_seed(0)
    first = secure_normal(5)
    torch.manual_seed(0)
    assert len(first) == 5 and not torch.equal(first, secure_normal(5))


def test_epsilon_is_the_librarys_and_agrees_with_the_formula() -> None:
    """Renyi differential privacy of a Gaussian: alpha / (2 sigma^2), times the releases; then the conversion
    of Balle et al., 2020."""
    sigma, times, delta = 2.0, 7, 1e-5
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
    best = min(
        times * a / (2 * sigma**2) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in orders
    )
    assert epsilon_of([(sigma, times)], delta) == pytest.approx(best, rel=1e-9)
    assert epsilon_of([(sigma, 3), (sigma, 4)], delta) == pytest.approx(best, rel=1e-9)
    from opacus.accountants import RDPAccountant

    library = RDPAccountant()
    for _ in range(times):
        library.step(noise_multiplier=sigma, sample_rate=1.0)
    assert epsilon_of([(sigma, times)], delta) == pytest.approx(library.get_epsilon(delta), rel=1e-9)
    assert epsilon_of([], delta) == 0 and epsilon_of([(0.0, 1)], delta) == math.inf


def test_an_update_on_a_device_gets_the_same_noise() -> None:
    def protected(device: torch.device | str) -> dict[str, torch.Tensor]:
        given = {"a": torch.full((1, 300), 3.0), "b": torch.ones(1, 2, 40).double()}
        return noised({k: v.to(device) for k, v in given.items()}, 2.0, 0.5, keyed_normal(Key(4)))

    expected = protected("cpu")
    with pretended_gpu() as gpu:
        found = protected(gpu.device)
        assert gpu.largest_read == 8 and all(value.device == gpu.device for value in found.values())
        assert all(torch.equal(found[name].cpu(), expected[name]) for name in expected)
