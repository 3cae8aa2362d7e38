"""LeNet with today's usual layers: ReLU and max pooling where LeNet-5 had sigmoids and weighted means.

LeCun, Bottou, Bengio, Haffner: "Gradient-based learning applied to document recognition". Proceedings of the
IEEE 86(11), 1998.
"""

from __future__ import annotations

from torch import nn

from holdfast.core.registry import register, setting
from holdfast.models.backbone_head import image_shape
from holdfast.models.base import NetworkPart
from holdfast.models.two_convolutions import two_convolutions

_FRAME = 32


@register("model", "lenet", paper="LeNet-5 (1998); FedCOM uses a LeNet that it does not describe")
class LeNet(NetworkPart):
    """LeNet-5's widths with ReLU and 2x2 max pooling: 5x5 convolutions of 6 and 16 channels, linear layers of
    120 and 84, the head.

    LeNet-5 saw digits of 28x28 in a frame of 32x32, so smaller images get a margin of 2 zeros and 28x28 and
    32x32 both end in 400 features. Parameters: 61,706 for 10 classes of 1x28x28 images, 62,006 for 10 classes
    of 3x32x32 images.

    """

    margin: int | None = setting(
        None, "zeros around the image; none: 2 for images smaller than 32x32, else 0", ge=0, le=4
    )

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape(self.name, sample_shape)
        margin = self.margin if self.margin is not None else 2 if min(height, width) < _FRAME else 0
        return two_convolutions(self.name, (channels, height, width), (6, 16), (120, 84), classes, margin)
