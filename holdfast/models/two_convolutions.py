"""The network that several papers use, in different widths: two blocks of convolution over 5, ReLU and
pooling by 2; then linear layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from holdfast.core.errors import ConfigError
from holdfast.models.backbone_head import BackboneHead

_KERNEL, _SMALLEST = 5, 16


def two_convolutions(
    model: str,
    sample_shape: tuple[int, ...],
    channels: tuple[int, int],
    hidden: Sequence[int],
    classes: int,
    padding: int = 0,
) -> BackboneHead:
    """Build the network for images, or for windows [channels, length] as images of height 1: stacks of
    clients are fast with convolutions of images."""
    (inside, *sides), (first, second) = sample_shape, channels
    window = len(sides) == 1
    kernel, pool = ((1, _KERNEL), (1, 2)) if window else ((_KERNEL, _KERNEL), (2, 2))
    left = [_remaining(_remaining(side + 2 * padding)) for side in sides]
    if min(left) < 1:
        what, least = "windows" if window else "images", _size([_SMALLEST - 2 * padding] * len(sides))
        raise ConfigError(f"model '{model}' needs {what} of at least {least}, not {_size(sides)}; try 'mlp'")
    layers: list[nn.Module] = [nn.Unflatten(1, (inside, 1))] if window else []
    layers += [nn.Conv2d(inside, first, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(pool)]
    layers += [nn.Conv2d(first, second, kernel), nn.ReLU(), nn.MaxPool2d(pool), nn.Flatten()]
    features = second * math.prod(left)
    for width in hidden:
        layers += [nn.Linear(features, width), nn.ReLU()]
        features = width
    return BackboneHead(nn.Sequential(*layers), nn.Linear(features, classes))


def _remaining(side: int) -> int:
    """Return the length of a side after an unpadded convolution and pooling by 2."""
    return (side - _KERNEL + 1) // 2


def _size(sides: Sequence[int]) -> str:
    return "x".join(map(str, sides))
