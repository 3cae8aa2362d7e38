"""Measures: numbers that tables and figures show and that are not in the results of a run."""

from holdfast.reproduction.measures import c_pfl, common, fedas, fedcap, fedcom, fedcpa
from holdfast.reproduction.measures.base import measure, measured

__all__ = ["c_pfl", "common", "fedas", "fedcap", "fedcom", "fedcpa", "measure", "measured"]
