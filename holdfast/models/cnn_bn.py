"""A small convolutional network with the two layers that are hard to batch over clients: BatchNorm (buffers)
and Dropout (randomness)."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator
from torch import nn

from holdfast.core.errors import ConfigError
from holdfast.core.registry import register, setting
from holdfast.models.backbone_head import BackboneHead, as_tuple, image_shape, widths
from holdfast.models.base import NetworkPart


@register("model", "cnn-bn")
class CnnBn(NetworkPart):
    """A small CNN with BatchNorm and Dropout: per block a 3x3 convolution, BatchNorm, ReLU and 2x2 pooling,
    then one hidden layer."""

    channels: int | tuple[int, ...] = setting(
        (16, 32), "output channels, one number per block; every block halves the image"
    )
    hidden: int = setting(64, "width of the hidden linear layer", ge=1)
    dropout: float = setting(0.2, "probability of dropping a hidden unit", ge=0, lt=1)

    @field_validator("channels", mode="before")
    @classmethod
    def _widths(cls, given: Any) -> Any:
        return widths(given)

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape(self.name, sample_shape)
        blocks = as_tuple(self.channels)
        smallest = 2 ** len(blocks)
        if min(height, width) < smallest:
            raise ConfigError(
                f"model '{self.name}' with {len(blocks)} blocks needs images of at least"
                f" {smallest}x{smallest}, not {height}x{width}; list fewer model.channels"
            )
        layers: list[nn.Module] = []
        for wide in blocks:
            layers += [
                nn.Conv2d(channels, wide, 3, padding=1),
                nn.BatchNorm2d(wide),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
            channels, height, width = wide, height // 2, width // 2
        layers += [
            nn.Flatten(),
            nn.Linear(channels * height * width, self.hidden),
            nn.ReLU(),
            nn.Dropout(self.dropout),
        ]
        return BackboneHead(nn.Sequential(*layers), nn.Linear(self.hidden, classes))
