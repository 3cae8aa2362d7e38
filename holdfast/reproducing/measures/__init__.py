"""What some tables and figures show and no result has."""

from holdfast.reproducing.measures import c_pfl, common, fedas, fedcap, fedcom, fedcpa
from holdfast.reproducing.measures.base import measure, measured

__all__ = ["c_pfl", "common", "fedas", "fedcap", "fedcom", "fedcpa", "measure", "measured"]
