"""A model that is one module, so that all of it can be the head."""

from __future__ import annotations

from torch import nn


def whole() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 10)))
