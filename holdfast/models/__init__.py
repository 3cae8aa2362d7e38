"""Networks that can be chosen by name; importing this package registers them."""

from __future__ import annotations

from holdfast.models.backbone_head import BackboneHead
from holdfast.models.base import NetworkPart
from holdfast.models.cnn_512 import Cnn512
from holdfast.models.cnn_bn import CnnBn
from holdfast.models.fedcap_cnn import FedCapCnn
from holdfast.models.lenet import LeNet
from holdfast.models.mlp import Mlp
from holdfast.models.resnet18 import ResNet18
from holdfast.models.text_cnn import TextCnn
from holdfast.models.text_mean import TextMean

__all__ = [
    "Cnn512",
    "CnnBn",
    "FedCapCnn",
    "LeNet",
    "Mlp",
    "NetworkPart",
    "ResNet18",
    "BackboneHead",
    "TextCnn",
    "TextMean",
]
