"""Convolutions over a text. Yoon Kim: "Convolutional Neural Networks for Sentence Classification". EMNLP
2014."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import field_validator
from torch import Tensor, nn

from holdfast.core.registry import register, setting
from holdfast.models.backbone_head import BackboneHead, as_tuple, widths
from holdfast.models.base import NetworkPart, SampleKind
from holdfast.models.hashed_embedding import ROWS, HashedEmbedding, text_length


@register(
    "model", "text-cnn", paper="Kim: Convolutional Neural Networks for Sentence Classification, EMNLP 2014"
)
class TextCnn(NetworkPart):
    """For texts: word vectors, convolutions over 3, 4 and 5 words, the maximum of each channel over the text,
    Dropout, the head.

    A convolution begins at every word of the text and may reach past its end, so the length of the padding
    does not matter. Vectors are narrower than the paper's 300 and learned from scratch. Parameters: 564,192
    for 4 classes.
    """

    reads: ClassVar[tuple[SampleKind, ...]] = ("words",)
    rows: int = setting(
        ROWS, "rows of the word table, one of them for padding; words with equal hashes share a row", ge=2
    )
    embedding: int = setting(32, "width of a word's vector", ge=1)
    channels: int = setting(100, "output channels of each convolution", ge=1)
    kernels: int | tuple[int, ...] = setting(
        (3, 4, 5), "number of words that a convolution covers; a list has one number per convolution"
    )
    dropout: float = setting(0.5, "probability of dropping a feature", ge=0, lt=1)

    @field_validator("kernels", mode="before")
    @classmethod
    def _kernels(cls, given: Any) -> Any:
        if isinstance(given, (list, tuple)) and not given:
            raise ValueError("expected at least one convolution")
        return widths(given)

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        text_length(self.name, sample_shape)
        kernels = as_tuple(self.kernels)
        features = _Maxima(self.rows, self.embedding, self.channels, kernels)
        return BackboneHead(
            nn.Sequential(features, nn.Dropout(self.dropout)),
            nn.Linear(self.channels * len(kernels), classes),
        )


class _Maxima(nn.Module):
    """Maps [B, length] to [B, kernels * channels]; all zeros for a text without words."""

    def __init__(self, rows: int, embedding: int, channels: int, kernels: tuple[int, ...]):
        super().__init__()
        self.words = HashedEmbedding(rows, embedding)
        # a text is an image of height 1: stacks of clients are fast with convolutions of images
        self.kernels = kernels
        self.convolutions = nn.ModuleList(nn.Conv2d(embedding, channels, (1, kernel)) for kernel in kernels)

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.words(x).transpose(1, 2)[:, :, None]  # [B, embedding, 1, length]
        begins = (x > 0)[:, None, None]
        found = []
        for kernel, convolution in zip(self.kernels, self.convolutions, strict=True):
            seen = F.relu(convolution(F.pad(vectors, (0, kernel - 1))))
            # values are never below 0, so a 0 in the padding does not matter
            found.append((seen * begins).amax((2, 3)))
        return torch.cat(found, 1)
