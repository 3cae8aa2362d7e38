"""Published methods, one file each: a client half and a server half."""

from holdfast.methods import (
    apfl,
    c_pfl,
    clustered_fl,
    ditto,
    fedas,
    fedavg,
    fedavg_ft,
    fedbabu,
    fedbn,
    fedcap,
    fedcom,
    fedper,
    fedprox,
    fedrep,
    lg_fedavg,
    local,
    pfedme,
)
from holdfast.methods.base import ClientRule, Method, ServerRule
from holdfast.methods.context import Context

__all__ = [
    "ClientRule",
    "Context",
    "Method",
    "ServerRule",
    "apfl",
    "c_pfl",
    "clustered_fl",
    "ditto",
    "fedas",
    "fedavg",
    "fedavg_ft",
    "fedbabu",
    "fedbn",
    "fedcap",
    "fedcom",
    "fedper",
    "fedprox",
    "fedrep",
    "lg_fedavg",
    "local",
    "pfedme",
]
