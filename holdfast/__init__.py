"""Holdfast: federated learning that stays personal under heterogeneous data and stays upright under attack.

import holdfast
run = holdfast.run(method={"name": "ditto", "lam": 0.5}, train={"rounds": 20})
run.final["accuracy"], run.metrics, run.model(client=7)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.core.version import __version__ as __version__

if TYPE_CHECKING:
    from holdfast.api import open as open
    from holdfast.api import plan, resume, run, sweep, tune
    from holdfast.core.errors import HoldfastError
    from holdfast.core.registry import Part, load_plugin, register, setting
    from holdfast.data.handed.data import Data
    from holdfast.interactive.run import Run
    from holdfast.interactive.sweep import Sweep, SweepCell
    from holdfast.models.own_module import Model
    from holdfast.results.run import load

# Public names and where they live; torch is imported when one of them is first used, not by `import
# holdfast`.
_HOMES = {
    "run": "holdfast.api",
    "sweep": "holdfast.api",
    "tune": "holdfast.api",
    "plan": "holdfast.api",
    "resume": "holdfast.api",
    "open": "holdfast.api",
    "load": "holdfast.results.run",
    "Data": "holdfast.data.handed.data",
    "Run": "holdfast.interactive.run",
    "Sweep": "holdfast.interactive.sweep",
    "SweepCell": "holdfast.interactive.sweep",
    "Model": "holdfast.models.own_module",
    "Part": "holdfast.core.registry",
    "register": "holdfast.core.registry",
    "load_plugin": "holdfast.core.registry",
    "setting": "holdfast.core.registry",
    "HoldfastError": "holdfast.core.errors",
}
# Without `open`: `from holdfast import *` must not hide Python's own.
__all__ = [
    "Data",
    "HoldfastError",
    "Model",
    "Part",
    "Run",
    "Sweep",
    "SweepCell",
    "load",
    "load_plugin",
    "plan",
    "register",
    "resume",
    "run",
    "setting",
    "sweep",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'holdfast' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*_HOMES, "__version__"]
