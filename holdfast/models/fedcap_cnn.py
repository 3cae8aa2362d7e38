"""The image networks of FedCAP.

Youpeng Li, Xinda Wang, Fuxun Yu, Lichao Sun, Wenbin Zhang, Xuyu Wang:
"FedCAP: Robust Federated Learning via Customized Aggregation and Personalization". ACSAC 2024.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from holdfast.core.errors import ConfigError
from holdfast.core.registry import Part, register, setting
from holdfast.models.split import Split, image_shape

# Output channels of the two convolutions, width of the first linear layer.
_WIDTHS = {"cifar": (32, 64, 64), "emnist": (16, 32, 128)}
_KERNEL = 5


@register("model", "fedcap-cnn", paper="FedCAP (ACSAC 2024)")
class FedCapCnn(Part):
    """FedCAP's CNN: two 5x5 convolutions, each with ReLU and 2x2 pooling, then two linear layers, the last of which is the head.

    With 10 classes of 3x32x32 images it has 156,810 parameters, with 62 classes of 1x28x28 images 86,910.
    """

    form: Literal["auto", "cifar", "emnist"] = setting("auto", "the paper's widths for CIFAR-10 or for EMNIST; auto: emnist for 1 channel")

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape(self.name, sample_shape)
        form = self.form if self.form != "auto" else "emnist" if channels == 1 else "cifar"
        first, second, hidden = _WIDTHS[form]
        rows, columns = _remaining(_remaining(height)), _remaining(_remaining(width))
        if rows < 1 or columns < 1:
            raise ConfigError(f"model '{self.name}' needs images of at least 16x16, not {height}x{width}; try 'mlp' or 'cnn-bn'")
        backbone = nn.Sequential(
            nn.Conv2d(channels, first, _KERNEL), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(first, second, _KERNEL), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(second * rows * columns, hidden), nn.ReLU(),
        )  # fmt: skip
        return Split(backbone, nn.Linear(hidden, classes))


def _remaining(size: int) -> int:
    """Pixels left along one side after an unpadded convolution and pooling by 2."""
    return (size - _KERNEL + 1) // 2
