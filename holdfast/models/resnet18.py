"""ResNet18 for small images: a 3x3 stem without pooling. He, Zhang, Ren, Sun: Deep Residual Learning for
Image Recognition, CVPR 2016."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.core.errors import ConfigError
from holdfast.core.registry import register, setting
from holdfast.models.backbone_head import BackboneHead, image_shape
from holdfast.models.base import NetworkPart
from holdfast.models.half_activations import rounded

Norm = Literal["group", "batch"]


class _Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inside: int, width: int, stride: int, norm: Norm):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 3, stride, 1, bias=False)
        self.norm1 = _norm(norm, width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = _norm(norm, width)
        changed = stride > 1 or inside != width
        self.short = (
            nn.Sequential(nn.Conv2d(inside, width, 1, stride, bias=False), _norm(norm, width))
            if changed
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(rounded(self.norm2(self.conv2(inner))) + self.short(x))


class _Mean(nn.Module):
    """Averages over all positions of an image of any size; PyTorch's own layer is slow in a stack."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


@register(
    "model", "resnet18", paper="He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, CVPR 2016"
)
class ResNet18(NetworkPart):
    """For images of 32x32, 64x64 and more: eighteen layers with shortcuts; 11,173,962 parameters for 10
    classes of colour images."""

    norm: Norm = setting("group", "group: 8 groups per layer, independent of the batch; batch: as published")
    outputs: int | None = setting(
        None, "width of the head; none: the number of classes; FedCPA's released code has 1000", ge=1
    )

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, _, _ = image_shape(self.name, sample_shape)
        outputs = classes if self.outputs is None else self.outputs
        if outputs < classes:
            raise ConfigError(
                f"model.outputs = {outputs} is fewer than the {classes} classes of the data; leave it out"
            )
        layers: list[nn.Module] = [
            nn.Conv2d(channels, 64, 3, 1, 1, bias=False),
            _norm(self.norm, 64),
            nn.ReLU(),
        ]
        inside = 64
        for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            layers += [_Block(inside, width, stride, self.norm), _Block(width, width, 1, self.norm)]
            inside = width
        return BackboneHead(nn.Sequential(*layers, _Mean()), nn.Linear(512, outputs))


def _norm(name: Norm, width: int) -> nn.Module:
    return nn.GroupNorm(8, width) if name == "group" else nn.BatchNorm2d(width)
