"""Aggregators around aggregators: a wrapper registers here under kind `wrapper` and maps one rule to another."""

from holdfast.aggregators.base import Wrapper

__all__ = ["Wrapper"]
