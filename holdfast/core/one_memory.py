"""Tensors of several experiments that lie in the same memory, as the rows of one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def one_memory(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """All rows between parts of one memory, as a tensor that shares it, and where each part starts there;
    None where parts lie in memories of their own."""
    first, size = parts[0], math.prod(parts[0].shape[1:])
    offsets = torch.tensor([part.storage_offset() for part in parts])
    begin = int(offsets.min())
    together = size > 0 and all(
        part.shape == first.shape
        and part.dtype == first.dtype
        and part.is_contiguous()
        and part.untyped_storage()._cdata == first.untyped_storage()._cdata
        and (part.storage_offset() - begin) % size == 0
        for part in parts
    )
    if not together:
        return None
    starts = (offsets - begin) // size
    rows = int(starts.max()) + len(first)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), begin), starts
