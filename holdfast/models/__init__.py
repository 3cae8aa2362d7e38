"""Networks that can be chosen by name, one file each. The registry finds the files."""

from __future__ import annotations

from holdfast.models.backbone_head import BackboneHead
from holdfast.models.base import NetworkPart

__all__ = ["BackboneHead", "NetworkPart"]
