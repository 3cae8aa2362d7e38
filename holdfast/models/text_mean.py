"""The fastest network for texts: the mean of the word vectors, as in fastText, and one hidden layer.

Joulin, Grave, Bojanowski, Mikolov: "Bag of Tricks for Efficient Text Classification". EACL 2017.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from holdfast.core.registry import register, setting
from holdfast.models.backbone_head import BackboneHead
from holdfast.models.base import NetworkPart, SampleKind
from holdfast.models.hashed_embedding import ROWS, HashedEmbedding, text_length


@register(
    "model", "text-mean", paper="Joulin et al.: Bag of Tricks for Efficient Text Classification, EACL 2017"
)
class TextMean(NetworkPart):
    """For texts: the mean of the words' vectors, one hidden layer with ReLU, the head; 525,476 parameters for
    4 classes."""

    reads: ClassVar[tuple[SampleKind, ...]] = ("words",)
    rows: int = setting(
        ROWS, "rows of the word table, one of them for padding; words with equal hashes share a row", ge=2
    )
    embedding: int = setting(32, "width of a word's vector", ge=1)
    hidden: int = setting(32, "width of the hidden layer", ge=1)

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        text_length(self.name, sample_shape)
        backbone = nn.Sequential(
            _Mean(self.rows, self.embedding), nn.Linear(self.embedding, self.hidden), nn.ReLU()
        )
        return BackboneHead(backbone, nn.Linear(self.hidden, classes))


class _Mean(nn.Module):
    """Maps [B, length] to [B, embedding]; zeros for a text without words."""

    def __init__(self, rows: int, embedding: int):
        super().__init__()
        self.words = HashedEmbedding(rows, embedding)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x).sum(1) / (x > 0).sum(1, keepdim=True).clamp(min=1)
