"""False numbers that attackers send beside their update: multiplied by a factor, mirrored, or random."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from holdfast.attacks.shared_rows import normal, uniform
from holdfast.core.keys import Key
from holdfast.core.types import UNDEFINED, Field

Lie = float | Literal["invert", "random"]


def lie(how: Lie, honest: Tensor, field: Field, key: Key) -> Tensor:
    """The false rows in place of the honest ones; `key` has one key per row. "invert" mirrors within the
    field's bounds (an accuracy of 1 becomes 0), "random" draws evenly between them; without bounds the sign
    changes, or a normal number is the factor. Above a lower bound alone, 4 becomes 1/4, or the normal number
    has no sign: a value out of bounds would be refused. A client without a figure still sends none."""
    said = (honest * how).to(honest.dtype) if not isinstance(how, str) else _made_up(how, honest, field, key)
    return torch.where(honest == UNDEFINED, honest, said) if field.low == UNDEFINED else said


def _made_up(how: str, honest: Tensor, field: Field, key: Key) -> Tensor:
    key = key.to(honest.device)
    low, high, invert = 0.0 if field.low == UNDEFINED else field.low, field.high, how == "invert"
    shape, kind = honest.shape[1:], honest.dtype
    if low is not None and high is not None:
        return low + high - honest if invert else low + (high - low) * uniform(key, *shape, dtype=kind)
    if low is None:
        return -honest if invert else honest * normal(key, *shape, dtype=kind)
    above = honest - low
    return low + (
        torch.where(above > 0, 1 / above, above) if invert else above * normal(key, *shape, dtype=kind).abs()
    )
