"""What every network that is chosen by name has: the kinds of samples it reads, and a file that it may start
from."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import nn

from holdfast.core.errors import ConfigError
from holdfast.core.registry import Part, parts, setting

SampleKind = Literal["images", "windows", "tables", "words"]
"""[channels, height, width]; [channels, length], as sensors record it; numbers of any other shape; hashes of
a text's words."""
_NEEDS: dict[str, str] = {
    "images": "images [channels, height, width]",
    "windows": "windows [channels, length]",
    "tables": "numbers",
    "words": "the words of a text",
}
_OF_THE_START = {"weights", "weights_head"}


class NetworkPart(Part):
    """Builds a `BackboneHead`. The file it starts from is not part of its architecture: experiments that
    differ only in that are trained together."""

    reads: ClassVar[tuple[SampleKind, ...]] = ("images",)
    weights: str | None = setting(
        None, "safetensors file to start from, with tensors under the model's own names; none: a fresh start"
    )
    weights_head: Literal["file", "fresh"] = setting(
        "file", "start of the head: from that file too, or fresh, for example for other classes"
    )

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        raise TypeError(f"{type(self).__name__} does not implement build")


def architecture(part: Part) -> dict[str, Any]:
    """Return the settings that determine the architecture."""
    return {name: value for name, value in part.settings().items() if name not in _OF_THE_START}


def kind_of(sample_shape: tuple[int, ...], words: bool) -> SampleKind:
    if words:
        return "words"
    return "images" if len(sample_shape) == 3 else "windows" if len(sample_shape) == 2 else "tables"


def check_reads(part: Part, sample_shape: tuple[int, ...], words: bool = False) -> None:
    """Refuse samples that the network cannot read, and name the networks that can; a plug-in's network
    without `reads` may read anything."""
    kind, reads = kind_of(sample_shape, words), getattr(part, "reads", None)
    if reads is None or kind in reads:
        return
    able = [name for name, other in parts("model").items() if kind in getattr(other, "reads", ())]
    have = (
        f"a sample is a text of {sample_shape[0]} words"
        if words
        else f"a sample has shape {list(sample_shape)}"
    )
    needs = _NEEDS["tables"] if "tables" in reads else " or ".join(_NEEDS[need] for need in reads)
    raise ConfigError(f"model '{part.name}' needs {needs}, but {have}; try {', '.join(able)}")
