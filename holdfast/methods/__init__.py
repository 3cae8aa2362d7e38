"""Published methods, one file each: a client half and a server half."""

from holdfast.methods import apfl, clustered_fl, ditto, fedavg, fedavg_ft, fedbabu, fedbn, fedper, fedprox, fedrep, lg_fedavg, local, pfedme
from holdfast.methods.base import ClientRule, Method, ServerRule
from holdfast.methods.context import Context

__all__ = [
    "ClientRule", "Context", "Method", "ServerRule", "apfl", "clustered_fl", "ditto", "fedavg", "fedavg_ft", "fedbabu", "fedbn", "fedper",
    "fedprox", "fedrep", "lg_fedavg", "local", "pfedme",
]  # fmt: skip
