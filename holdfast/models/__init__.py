"""Networks that can be chosen by name; importing this package registers them."""

from __future__ import annotations

from holdfast.models.cnn_bn import CnnBn
from holdfast.models.fedcap_cnn import FedCapCnn
from holdfast.models.mlp import Mlp
from holdfast.models.resnet18 import ResNet18
from holdfast.models.split import Split

__all__ = ["CnnBn", "FedCapCnn", "Mlp", "ResNet18", "Split"]
