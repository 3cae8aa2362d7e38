"""Epsilon of Gaussian releases, by Opacus' accountant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from holdfast.core.errors import ConfigError

_ALPHAS = [
    1.001,
    1.003,
    1.01,
    1.03,
    *(1 + x / 10 for x in range(1, 100)),
    *map(float, range(12, 64)),
    *(2.0**x for x in range(6, 14)),
]
Releases = Sequence[tuple[float, int]]
"""Noise multipliers and how often each was used, in order."""


def need_accountant() -> None:
    """Raise a one-line error where Opacus, which is optional, is not installed."""
    if find_spec("opacus") is None:
        raise ConfigError(
            "[privacy] needs an accountant, which is not installed: pip install 'holdfast[privacy]'"
        )


def epsilon_of(releases: Releases, delta: float) -> float:
    """Return epsilon by Opacus (Renyi divergences) for Gaussian releases that all concern this client's data.

    epsilon_of([(0.5, 10)], 1e-5)    # ten releases with noise half as large as the distance"""
    return _epsilon(tuple(releases), delta)


def epsilon_of_samples(multiplier: float, rate: float, steps: int, delta: float) -> float:
    """Return epsilon for steps on Poisson samples, each of which takes a sample with probability `rate`."""
    if not steps:
        return 0.0
    if multiplier <= 0:
        return math.inf
    from opacus.accountants.analysis import rdp

    one = _divergences(multiplier, rate)  # of one step; those of several steps add up
    return float(rdp.get_privacy_spent(orders=_ALPHAS, rdp=one * steps, delta=delta)[0])


@lru_cache(maxsize=4096)
def _divergences(multiplier: float, rate: float) -> Any:
    from opacus.accountants.analysis import rdp

    return rdp.compute_rdp(q=rate, noise_multiplier=multiplier, steps=1, orders=_ALPHAS)


@lru_cache(maxsize=4096)
def _epsilon(releases: tuple[tuple[float, int], ...], delta: float) -> float:
    if not releases:
        return 0.0
    if any(multiplier <= 0 for multiplier, _ in releases):
        return math.inf
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(multiplier, 1.0, times) for multiplier, times in releases]
    return float(accountant.get_epsilon(delta, alphas=_ALPHAS))
