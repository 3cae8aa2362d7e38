"""Published methods, one file each: a client half and a server half."""

from holdfast.methods import cd2_pfed, ditto, fedala, fedamp, fedavg, fedavg_ft, fedfomo, fedprox, fedrod, local
from holdfast.methods.base import ClientRule, Method, ServerRule
from holdfast.methods.context import Context

__all__ = [
    "ClientRule", "Context", "Method", "ServerRule",
    "cd2_pfed", "ditto", "fedala", "fedamp", "fedavg", "fedavg_ft", "fedfomo", "fedprox", "fedrod", "local",
]  # fmt: skip
