"""Aggregators around aggregators: a wrapper registers here under kind `wrapper` and maps one rule to another.
One file each."""

from holdfast.aggregators.base import Wrapper
from holdfast.wrappers import bucketing, clip, gas, nnm
from holdfast.wrappers.base import Around, Wrapped

__all__ = ["Around", "Wrapped", "Wrapper", "bucketing", "clip", "gas", "nnm"]
