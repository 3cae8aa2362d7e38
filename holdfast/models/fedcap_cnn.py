"""The networks of FedCAP: for images, and for windows of a sensor's readings.

Youpeng Li, Xinda Wang, Fuxun Yu, Lichao Sun, Wenbin Zhang, Xuyu Wang:
"FedCAP: Robust Federated Learning via Customized Aggregation and Personalization". ACSAC 2024.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import nn

from holdfast.core.errors import ConfigError
from holdfast.core.registry import register, setting
from holdfast.models.backbone_head import image_shape
from holdfast.models.base import NetworkPart, SampleKind
from holdfast.models.two_convolutions import two_convolutions

# Output channels of the two convolutions, width of the first linear layer.
_WIDTHS = {"cifar": (32, 64, 64), "emnist": (16, 32, 128), "sensor": (32, 64, 64)}


@register("model", "fedcap-cnn", paper="FedCAP (ACSAC 2024)")
class FedCapCnn(NetworkPart):
    """FedCAP's CNN for images or windows: two convolutions over 5 with ReLU and pooling by 2, then two linear
    layers, the last the head.

    Parameters: 156,810 for 10 classes of 3x32x32 images, 86,910 for 62 classes of 1x28x28 images, 203,782 for
    6 classes of windows of 3 axes x 200 readings.

    """

    reads: ClassVar[tuple[SampleKind, ...]] = ("images", "windows")
    form: Literal["auto", "cifar", "emnist", "sensor"] = setting(
        "auto",
        "the paper's widths for CIFAR-10, EMNIST or WISDM; auto: sensor for windows, emnist for images of 1"
        " channel",
    )

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        window = len(sample_shape) == 2
        if not window:
            image_shape(self.name, sample_shape)
        form = (
            self.form
            if self.form != "auto"
            else "sensor"
            if window
            else "emnist"
            if sample_shape[0] == 1
            else "cifar"
        )
        if window != (form == "sensor"):
            raise ConfigError(
                f'model.form = "{form}" does not fit samples of shape {list(sample_shape)}; leave it out'
            )
        first, second, hidden = _WIDTHS[form]
        return two_convolutions(self.name, sample_shape, (first, second), [hidden], classes)
