"""The form of every built-in network: a backbone that computes features and a head that computes logits from
them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from holdfast.core.errors import ConfigError


class BackboneHead(nn.Module):
    """Computes head(backbone(x)). Methods that share or freeze one of the two find them by these names."""

    def __init__(self, backbone: nn.Module, head: nn.Module):
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def image_shape(model: str, sample_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the shape as (channels, height, width); otherwise raise an error that names the model."""
    if len(sample_shape) != 3:
        raise ConfigError(
            f"model '{model}' needs images [channels, height, width], but a sample has shape"
            f" {list(sample_shape)}; 'mlp' takes any shape"
        )
    channels, height, width = sample_shape
    return channels, height, width


def widths(given: Any) -> Any:
    """Check a setting that is one layer width or a list of them; a single number stays as it is, a list
    becomes a tuple."""
    listed = list(given) if isinstance(given, (list, tuple)) else [given]
    if any(isinstance(width, bool) or not isinstance(width, int) or width < 1 for width in listed):
        raise ValueError(f"expected a whole number of at least 1, or a list of them, not {given!r}")
    return given if isinstance(given, int) else tuple(listed)


def as_tuple(given: int | tuple[int, ...]) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else given
