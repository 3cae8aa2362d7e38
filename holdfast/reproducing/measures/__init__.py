"""What some tables and figures show and no result has."""

from holdfast.reproducing.measures import c_pfl, common, fedas, fedcap, fedcpa
from holdfast.reproducing.measures.base import measure, measured

__all__ = ["c_pfl", "common", "fedas", "fedcap", "fedcpa", "measure", "measured"]
