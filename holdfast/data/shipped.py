"""Decoded samples that came from another process or machine: an entry of the cache, named by their digest, so
that a machine receives them once.

A worker of a sweep need not have the dataset's files. Nothing here imports torch: the process of Ray that
fills the cache needs none."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from holdfast.core.errors import DataError
from holdfast.data.cache import CachedArrays, New, cached

Arrays = Mapping[str, np.ndarray]
FACTS = ("classes", "train_rows", "mean", "std", "name", "class_names", "user_names")
"""What a sample store has beside its arrays x, y and user."""


def keep(digest: str, facts: Mapping[str, Any], fetch: Callable[[], Arrays]) -> CachedArrays:
    """Return the samples with this digest from this machine's cache; where it has none, `fetch` is called
    for the arrays, and the cache keeps them."""

    def make(new: New) -> Mapping[str, Any]:
        for name, array in fetch().items():
            new(name, array.shape, array.dtype)[...] = array
        return facts

    return cached(_entry(digest), (), make)


def find(digest: str) -> CachedArrays:
    """Return the samples that `keep` put there in another process of this machine."""

    def missing(new: New) -> Mapping[str, Any]:
        raise DataError(f"the cache of this machine does not hold the samples with digest {digest[:12]}")

    return cached(_entry(digest), (), missing)


def _entry(digest: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise DataError("samples that were sent have no digest")
    return f"samples-{digest[:12]} {digest}"
