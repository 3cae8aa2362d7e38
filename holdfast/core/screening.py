"""Screening: what clients send is checked against the schema of the task before any rule sees it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from holdfast.core.types import Field, Schema, Uplink

NOT_FINITE = "is not finite"
FEDERATION_NORM_CAP = 1000.0
"""The norm above which a federation refuses an update by default. A sane round of training moves a network by
a few units; this only keeps out what would end the run. Simulations have no cap, so that the rule under test
faces magnitude attacks."""


def screen(up: Uplink, schema: Schema, norm_cap: float | None = None) -> Uplink:
    """Drop the rows that are not finite, out of bounds or have a norm above the cap, and say why. A wrong
    name, shape or type refuses every row, because a stack of rows has one of each; a real federation checks
    them client by client before it stacks."""
    refused = dict(up.refused)
    problem = _misshapen(up, schema)
    if problem:
        refused.update({int(i): problem for i in up.ids})
        return replace(up.only(torch.zeros(len(up), dtype=torch.bool)), refused=refused)
    good = torch.ones(len(up), dtype=torch.bool)
    for name, field in schema.items():
        for fault, bad in _faults(name, up[name], field, norm_cap).items():
            for client in up.ids[bad & good].tolist():
                refused[client] = fault
            good &= ~bad
    kept = up if bool(good.all()) else up.only(good)
    return replace(kept, refused=refused)


def _misshapen(up: Uplink, schema: Schema) -> str:
    if set(up.fields) != set(schema):
        return f"fields {sorted(up.fields)}, expected {sorted(schema)}"
    for name, field in schema.items():
        if tuple(up[name].shape[1:]) != field.shape:
            return f"{name} has shape {tuple(up[name].shape[1:])}, expected {field.shape}"
        if not (up[name].dtype == field.dtype if field.dtype else up[name].is_floating_point()):
            return (
                f"{name} has type {_word(up[name].dtype)}, expected"
                f" {_word(field.dtype) if field.dtype else 'floating point'}"
            )
    return ""


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _faults(name: str, rows: Tensor, field: Field, norm_cap: float | None) -> dict[str, Tensor]:
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:])).cpu()  # also when there are no rows
    if not flat.shape[1]:
        return {}
    # Extremes only (a NaN is both): a mask as large as what a whole cohort sent would not be within the
    # memory bound.
    least, most = flat.amin(1), flat.amax(1)
    faults = {f"{name} {NOT_FINITE}": ~(torch.isfinite(least) & torch.isfinite(most))}
    if field.low is not None:
        faults[f"{name} is below {field.low:g}"] = least < field.low
    if field.high is not None:
        faults[f"{name} is above {field.high:g}"] = most > field.high
    if norm_cap is not None and field.kind == "update":
        faults[f"{name} has a norm above {norm_cap:g}"] = flat.norm(dim=1) > norm_cap
    return faults
