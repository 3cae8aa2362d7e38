"""Randomness by name: a value depends on what it is for (seed, round, step, client, purpose), never on the
order of calls.

A key is one 64-bit number per row. Folding mixes more of the name in; drawing hashes the key with a counter.
Everything is integer arithmetic on tensors (the finaliser of splitmix64), so a stack of a thousand clients
draws at once, and one client alone, in another process, on another machine, draws the same numbers.





"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB
_ALL = 2**64 - 1


def mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64 tensors; products wrap around, shifts are logical."""
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix_number(x: int) -> int:
    """The same for one number: no tensor, so nothing has to be copied to a device."""
    x &= _ALL
    x = (x ^ (x >> 30)) * (_MIX1 & _ALL) & _ALL
    x = (x ^ (x >> 27)) * (_MIX2 & _ALL) & _ALL
    return _signed(x ^ (x >> 31))


def combine(bits: Tensor, part: Tensor | int) -> Tensor:
    """Mix one more number into a key; the order of parts matters."""
    if not isinstance(part, Tensor):
        return mix(bits * 3 + mix_number(part + _GOLDEN))
    # & -1 changes no bit, but tells Triton, which computes positions with 32 bits, that this one is a 64-bit
    # number
    return mix(bits * 3 + mix((part & -1) + _GOLDEN))


class Key:
    """A named source of randomness: a scalar, or one key per row."""

    __slots__ = ("bits",)

    def __init__(self, seed: int | Tensor):
        self.bits = seed if isinstance(seed, Tensor) else torch.tensor(_signed(seed), dtype=torch.int64)

    def __repr__(self) -> str:
        return f"Key({self.bits.tolist()})"

    def __len__(self) -> int:
        return self.bits.shape[0]

    def __getitem__(self, rows: slice | Tensor) -> Key:
        return Key(self.bits[rows])

    def fold(self, *parts: int | str | Tensor) -> Key:
        """A key for something more specific. A tensor part gives one key per row."""
        bits = self.bits
        for part in parts:
            bits = combine(bits, part.to(bits.device) if isinstance(part, Tensor) else _number(part))
        return Key(bits)

    def repeat(self, times: int) -> Key:
        return Key(self.bits.repeat(times))

    def to(self, device: torch.device | str) -> Key:
        return Key(self.bits.to(device))

    def hash(self, *shape: int) -> Tensor:
        """int64 of shape [*rows, *shape]: independent 64-bit numbers, one for each position."""
        counter = torch.arange(math.prod(shape), dtype=torch.int64, device=self.bits.device).view(shape)
        return combine(self.bits.view(*self.bits.shape, *[1] * len(shape)), counter)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """In [0, 1), 24 bits of it, so that float32 and float64 hold the same numbers."""
        return to_uniform(self.hash(*shape), dtype)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal by Box and Muller."""
        radius = 1.0 - self.fold("radius").uniform(*shape, dtype=torch.float64)
        angle = self.fold("angle").uniform(*shape, dtype=torch.float64)
        return (torch.sqrt(-2.0 * torch.log(radius)) * torch.cos(2.0 * math.pi * angle)).to(dtype)

    def seed(self) -> int:
        """A non-negative seed for libraries that have generators of their own; scalar keys only."""
        return int(self.bits) & (2**63 - 1)

    def numpy(self) -> np.random.Generator:
        return np.random.default_rng(self.seed())


def to_uniform(bits: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return (_shift(bits, 40)).to(dtype) * (1.0 / (1 << 24))


def _number(part: int | str) -> int:
    if isinstance(part, str):
        return int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little", signed=True)
    return _signed(part)


def _signed(number: int) -> int:
    return (int(number) + 2**63) % 2**64 - 2**63
