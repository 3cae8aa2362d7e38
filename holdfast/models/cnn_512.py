"""The network of FedAS and C-PFL, which the benchmark PFLlib calls FedAvgCNN.

Xiyuan Yang, Wenke Huang, Mang Ye: "FedAS: Bridging Inconsistency in Personalized Federated Learning". CVPR
2024.

"""

from __future__ import annotations

from torch import nn

from holdfast.core.registry import register
from holdfast.models.backbone_head import image_shape
from holdfast.models.base import NetworkPart
from holdfast.models.two_convolutions import two_convolutions


@register("model", "cnn-512", paper="FedAS (CVPR 2024), C-PFL")
class Cnn512(NetworkPart):
    """Two 5x5 convolutions of 32 and 64 channels, each with ReLU and 2x2 pooling, a linear layer of 512 units
    with ReLU, and the head.

    Parameters: 878,538 for 10 classes of 3x32x32 images, 582,026 for 10 classes of 1x28x28 images.

    """

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return two_convolutions(self.name, image_shape(self.name, sample_shape), (32, 64), [512], classes)
