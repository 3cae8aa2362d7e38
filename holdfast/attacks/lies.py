"""How attackers lie about a number beside their update: by a factor, by its mirror image, or by any number at all."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from holdfast.core.keys import Key
from holdfast.core.types import UNDEFINED, Field

Lie = float | Literal["invert", "random"]


def lie(how: Lie, honest: Tensor, field: Field, key: Key) -> Tensor:
    """What is said instead of the honest rows; `key` has one key per row. "invert" mirrors within the field's bounds (an accuracy of 1
    becomes 0), "random" draws evenly between them; without bounds the sign changes, or a normal number is the factor. Whoever has no
    figure to give still has none."""
    if not isinstance(how, str):
        return (honest * how).to(honest.dtype)
    low, high = 0.0 if field.low == UNDEFINED else field.low, field.high
    shape, kind = honest.shape[1:], honest.dtype
    if low is None or high is None:
        said = -honest if how == "invert" else honest * key.normal(*shape, dtype=kind)
    else:
        said = low + high - honest if how == "invert" else low + (high - low) * key.uniform(*shape, dtype=kind)
    return torch.where(honest == UNDEFINED, honest, said) if field.low == UNDEFINED else said
