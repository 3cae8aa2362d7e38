"""Published methods, one file each: a client half and a server half."""

from holdfast.methods import c_pfl, ditto, fedas, fedavg, fedavg_ft, fedcap, fedcom, fedgc, fedgh, fedpac, fedproto, fedprox, gpfl, local
from holdfast.methods.base import ClientRule, Method, ServerRule
from holdfast.methods.context import Context

__all__ = [
    "ClientRule",
    "Context",
    "Method",
    "ServerRule",
    "c_pfl",
    "ditto",
    "fedas",
    "fedavg",
    "fedavg_ft",
    "fedcap",
    "fedcom",
    "fedprox",
    "gpfl",
    "fedgc",
    "fedgh",
    "fedpac",
    "fedproto",
    "local",
]
