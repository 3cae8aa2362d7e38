"""Aggregators around aggregators, one file each: a wrapper maps one rule to another. The registry finds the
files."""

from holdfast.aggregators.base import Wrapper
from holdfast.wrappers.base import Around, Wrapped

__all__ = ["Around", "Wrapped", "Wrapper"]
