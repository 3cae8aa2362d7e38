"""Fully connected layers: for tables and other numbers; the fastest network on the embedded digits."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from pydantic import field_validator
from torch import nn

from holdfast.core.registry import register, setting
from holdfast.models.backbone_head import BackboneHead, as_tuple, widths
from holdfast.models.base import NetworkPart, SampleKind


@register("model", "mlp")
class Mlp(NetworkPart):
    """For tables: fully connected layers with ReLU on the flattened sample; an empty list of layers gives
    logistic regression.

    Images and windows are read as one long row of numbers.

    """

    reads: ClassVar[tuple[SampleKind, ...]] = ("tables", "windows", "images")
    hidden: int | tuple[int, ...] = setting(
        64, "width of the hidden layer, or a list with one width per layer"
    )
    dropout: float = setting(0.0, "probability of dropping a hidden unit", ge=0, lt=1)
    batch_norm: bool = setting(False, "normalise every hidden layer over the batch")

    @field_validator("hidden", mode="before")
    @classmethod
    def _widths(cls, given: Any) -> Any:
        return widths(given)

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        features = math.prod(sample_shape)
        for width in as_tuple(self.hidden):
            layers.append(nn.Linear(features, width))
            if self.batch_norm:
                layers.append(nn.BatchNorm1d(width))
            layers.append(nn.ReLU())
            if self.dropout:
                layers.append(nn.Dropout(self.dropout))
            features = width
        return BackboneHead(nn.Sequential(*layers), nn.Linear(features, classes))
