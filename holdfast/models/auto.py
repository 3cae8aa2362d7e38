"""The default model: a network by the kind of the samples."""

from __future__ import annotations

from typing import Any, ClassVar

from holdfast.core.registry import register
from holdfast.models.base import NetworkPart, SampleKind, kind_of

_SMALLEST = 16  # sides of images and length of windows that fedcap-cnn can halve twice


@register("model", "auto")
class Auto(NetworkPart):
    """Chooses by the data: fedcap-cnn for images of 16x16 or larger and for windows of 16 readings or more,
    text-mean for texts, mlp for tables, smaller images and shorter windows.

    The run's manifest names the network that was chosen.

    """

    reads: ClassVar[tuple[SampleKind, ...]] = ()  # the network that it names reads the samples

    def chosen(self, sample_shape: tuple[int, ...], words: bool) -> Any:
        """Return the name of the network for such samples or, where it starts from a file, its table."""
        kind = kind_of(sample_shape, words)
        if kind == "words":
            name = "text-mean"
        elif kind == "tables" or min(sample_shape[1:]) < _SMALLEST:
            name = "mlp"
        else:
            name = "fedcap-cnn"
        given = {setting: getattr(self, setting) for setting in self.model_fields_set}
        return {"name": name, **given} if given else name
