"""Mean and deviation, whatever the size of the numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.data.moments import Moments
from holdfast.data.samples import Samples


def measured(x: np.ndarray, pieces: int = 7) -> Moments:
    moments = Moments()
    for piece in np.array_split(x, pieces):
        moments.add(piece)
    return moments


def normalised(x: np.ndarray) -> torch.Tensor:
    moments = measured(x)
    samples = Samples(
        torch.from_numpy(x), torch.zeros(len(x), dtype=torch.int64), 1, len(x), moments.mean, moments.std
    )
    return samples.batch(torch.arange(len(x)))


@pytest.mark.parametrize("scale", [1e-30, 1e-13, 1.0, 1e30])
def test_the_scale_of_a_channel_does_not_matter(scale: float) -> None:
    noise = np.random.default_rng(0).normal(3, 2, (100, 2, 16)).astype(np.float32)
    moments = measured(noise * np.float32(scale))
    wanted = np.moveaxis(noise, 1, 0).reshape(2, -1).astype(np.float64) * scale
    np.testing.assert_allclose(moments.mean, wanted.mean(1), rtol=1e-6)
    np.testing.assert_allclose(moments.std, wanted.std(1), rtol=1e-6)
    x = normalised(noise * np.float32(scale))
    torch.testing.assert_close(x.std((0, 2), unbiased=False), torch.ones(2), rtol=0, atol=1e-5)


def test_noise_on_a_large_mean_in_float32_is_measured_exactly() -> None:
    x = (1e6 + np.random.default_rng(0).normal(size=(5000, 1, 20))).astype(np.float32)
    moments = measured(x, 50)
    exact = x.astype(np.longdouble)
    assert moments.mean[0] == pytest.approx(float(exact.mean()), abs=1e-8) and moments.std[
        0
    ] == pytest.approx(float(exact.std()), rel=1e-9)
    assert abs(float(normalised(x).mean())) < 0.05  # float32 tells 1/16 apart there


@pytest.mark.parametrize("value", [0.0, 0.1, 1e-13, 1e-40, 123456.789, -3e30])
def test_a_channel_that_never_changes_becomes_0(value: float) -> None:
    x = np.full((1000, 1, 7), value, dtype=np.float32)
    assert measured(x).std == (1.0,) and normalised(x).abs().max() <= abs(np.float32(value)) * 1e-7


def test_changes_below_float32_resolution_are_not_amplified() -> None:
    x = np.full((1000, 2, 10), 1e6, dtype=np.float32)
    x[0, 0, 0] = np.nextafter(
        np.float32(1e6), np.float32(2e6)
    )  # one step, once: deviation 6e-4 beside a mean that is not told so well
    x[:, 1] = 0
    x[0, 1, 0] = 1e-45
    assert measured(x).std == (1.0, 1.0) and normalised(x).abs().max() < 0.1
