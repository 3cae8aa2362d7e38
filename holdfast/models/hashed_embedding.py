"""Word vectors for hashed words: a text is a row of word hashes, and each row of the table serves many
words."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from holdfast.core.errors import ConfigError

ROWS = 16384


class HashedEmbedding(nn.Module):
    """Maps hashes [B, length] to vectors [B, length, width]. Row 0 of the table is padding, which counts as 0
    whatever is stored there."""

    def __init__(self, rows: int, width: int):
        super().__init__()
        self.rows = rows
        self.table = nn.Embedding(rows, width, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        real = x > 0
        row = torch.where(real, 1 + (x - 1) % (self.rows - 1), 0)
        return self.table(row) * real[..., None]


def text_length(model: str, sample_shape: tuple[int, ...]) -> int:
    """Return the largest number of words of a text; otherwise raise an error that names the model."""
    if len(sample_shape) != 1:
        raise ConfigError(
            f"model '{model}' needs texts [words], but a sample has shape {list(sample_shape)}; 'mlp' takes"
            " any shape"
        )
    return sample_shape[0]
