"""Whether what was read from a run's files can be used: the values that other code relies on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.core.reading import is_number, is_whole
from holdfast.core.types import State


def broken_part(part: Mapping[str, Any], round: int) -> str | None:
    """The name of a damaged value of a round's part, if any."""
    good = {
        "round": is_whole(part.get("round")) and part["round"] == round,
        "metrics": is_figures(part.get("metrics")),
    }
    seconds = part.get("seconds", {})
    good["seconds"] = isinstance(seconds, dict) and all(map(is_number, seconds.values()))
    for name in ("banned", "rejected", "refused"):
        told = part.get(name, {})
        good[name] = isinstance(told, dict) and all(re.fullmatch(r"-?\d{1,9}", client) for client in told)
    good |= {name: isinstance(part.get(name, []), list) for name in ("notes", "attack")}
    good["exchanges"] = is_whole(part.get("exchanges", 0))
    good["diverged"] = isinstance(part.get("diverged"), (str, type(None)))
    return next((name for name, fits in good.items() if not fits), None)


def broken_arrays(arrays: State) -> str | None:
    """The same for its arrays: ids are ids, and of evaluated clients each array has a row for every one."""
    for name, value in arrays.items():
        of, _, _ = name.partition("/")
        ids = arrays.get(f"{of}/ids", value) if of in ("evaluate", "late") else value
        listed = name in ("cohort", "took_part", "malicious", "verdict/ids", "evaluate/ids", "late/ids")
        if (
            value.is_complex()
            or listed
            and (value.dtype != torch.int64 or value.ndim != 1)
            or value.shape[:1] != ids.shape[:1]
        ):
            return name
    return None


def broken_result(result: Mapping[str, Any]) -> str | None:
    """The same for a result."""
    final, protocol = result.get("final"), result.get("protocol")
    good = {
        "final": is_figures(final),
        "protocol": isinstance(protocol, dict),
        "rounds": is_whole(result.get("rounds", 0)),
    }
    if isinstance(final, dict):
        good["diverged"] = final.get("diverged") is None or is_whole(final["diverged"])
    if isinstance(protocol, dict):
        lists = [protocol.get(name, []) for name in ("models", "metrics")]
        good["protocol"] = isinstance(protocol.get("deployed"), (str, type(None))) and all(
            isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists
        )
    return next((name for name in ("diverged", *good) if not good.get(name, True)), None)


def is_figures(value: Any) -> bool:
    """Numbers by name; what could not be measured is null."""
    return isinstance(value, dict) and all(figure is None or is_number(figure) for figure in value.values())
