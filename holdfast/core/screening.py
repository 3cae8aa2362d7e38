"""Screening: what clients send is checked against the schema of the task before any rule sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from holdfast.core.columns import Columns
from holdfast.core.device import to_device
from holdfast.core.one_memory import one_memory
from holdfast.core.types import UPDATE, Schema, Uplink

NOT_FINITE = "is not finite"
FEDERATION_NORM_CAP = 1000.0
"""The norm above which a federation refuses an update by default. A sane round of training moves a network by
a few units; this only keeps out what would end the run. Simulations have no cap, so that the rule under test
faces magnitude attacks."""


def screen(up: Uplink, schema: Schema, norm_cap: float | None = None) -> Uplink:
    """Drop the rows that are not finite, out of bounds or have a norm above the cap, and say why. A wrong
    name, shape or type refuses every row, because a stack of rows has one of each; a real federation checks
    them client by client before it stacks. Where several processes share the replies, all of them screen, and
    each refuses what is wrong in any column."""
    return screen_together([up], [schema], [norm_cap])[0]


def screen_together(
    ups: Sequence[Uplink], schemas: Sequence[Schema], caps: Sequence[float | None]
) -> list[Uplink]:
    """`screen` for several replies. Fields on a device are looked at there, those of replies that are alike
    as one stack; the host is told which rows are bad, in one copy for all replies."""
    screened: dict[int, Uplink] = {}
    groups: dict[object, list[int]] = {}
    for place, (up, schema, cap) in enumerate(zip(ups, schemas, caps, strict=True)):
        problem = _misshapen(up, schema)
        if problem:
            refused = {**up.refused, **{int(i): problem for i in up.ids}}
            screened[place] = replace(up.only(torch.zeros(len(up), dtype=torch.bool)), refused=refused)
        else:
            groups.setdefault(_alike(up, schema, cap) or place, []).append(place)
    faults = [
        _faults([ups[place] for place in places], schemas[places[0]], caps[places[0]])
        for places in groups.values()
    ]
    for places, found in zip(groups.values(), _on_host(faults), strict=True):
        shape = len(places), len(ups[places[0]])
        bad = torch.stack([mask.view(shape) for mask in found.values()], 1) if found else None
        touched = [False] * len(places) if bad is None else bad.any(2).any(1).tolist()
        for number, place in enumerate(places):
            faulty = dict(zip(found, bad[number], strict=True)) if bad is not None and touched[number] else {}
            screened[place] = _without(ups[place], faulty)
    return [screened[place] for place in range(len(ups))]


def _without(up: Uplink, faults: Mapping[str, Tensor]) -> Uplink:
    """The reply without the rows that have a fault, each with the first as the reason."""
    refused, good = dict(up.refused), torch.ones(len(up), dtype=torch.bool)
    for fault, bad in faults.items():
        for client in up.ids[bad & good].tolist():
            refused[client] = fault
        good &= ~bad
    return replace(up if bool(good.all()) else up.only(good), refused=refused)


def _alike(up: Uplink, schema: Schema, cap: float | None) -> object | None:
    """Replies on a device for which this is equal are looked at together. The host looks at one after the
    other, which needs no copies, and so do several processes that share them."""
    fields = [up[name] for name in schema]
    if up.columns is not None or all(field.device.type == "cpu" for field in fields):
        return None
    seen = tuple((tuple(field.shape), field.dtype, field.device) for field in fields)
    return tuple(schema.items()), seen, cap


def _misshapen(up: Uplink, schema: Schema) -> str:
    if set(up.fields) != set(schema):
        return f"fields {sorted(up.fields)}, expected {sorted(schema)}"
    for name, field in schema.items():
        shape, columns = tuple(up[name].shape[1:]), _shared(up, name)
        if columns is not None:
            if shape != (columns.width,):
                raise ValueError(f"{shape} columns of '{name}' are here, not {columns.width}")
            shape = (columns.total,)
        if shape != field.shape:
            return f"{name} has shape {shape}, expected {field.shape}"
        if not (up[name].dtype == field.dtype if field.dtype else up[name].is_floating_point()):
            return (
                f"{name} has type {_word(up[name].dtype)}, expected"
                f" {_word(field.dtype) if field.dtype else 'floating point'}"
            )
    return ""


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _faults(ups: Sequence[Uplink], schema: Schema, norm_cap: float | None) -> dict[str, Tensor]:
    """For each fault which rows have it, those of all replies one after the other."""
    faults = {}
    for name, field in schema.items():
        size = math.prod(field.shape)
        if not size:
            continue
        columns = _shared(ups[0], name)
        parts = [up[name] if columns is not None else up[name].reshape(len(up), size) for up in ups]
        # Extremes only (a NaN is both): a mask as large as what a whole cohort sent would not be within the
        # memory bound.
        least, most = _of_rows(_extremes, parts) if columns is None else _of_all_columns(parts[0], columns)
        faults[f"{name} {NOT_FINITE}"] = ~(torch.isfinite(least) & torch.isfinite(most))
        if field.low is not None:
            faults[f"{name} is below {field.low:g}"] = least < field.low
        if field.high is not None:
            faults[f"{name} is above {field.high:g}"] = most > field.high
        if norm_cap is not None and field.kind == "update":
            if columns is None:
                (length,) = _of_rows(lambda rows: (rows.norm(dim=1),), parts)
            else:
                length = _lengths(parts[0], columns)
            faults[f"{name} has a norm above {norm_cap:g}"] = length > norm_cap
    return faults


def _shared(up: Uplink, name: str) -> Columns | None:
    """Which columns of a field are here, where several processes share it."""
    return up.columns if name == UPDATE else None


def _of_all_columns(rows: Tensor, columns: Columns) -> tuple[Tensor, ...]:
    """`_extremes` of rows of which this process has some columns, or none."""
    ends = rows.new_tensor([torch.inf, -torch.inf])[:, None].expand(2, len(rows))
    mine = torch.stack(_extremes(rows)) if columns.width else ends
    found = torch.stack(columns.ranks.gather(mine.contiguous()), 0)
    return found[:, 0].amin(0), found[:, 1].amax(0)


def _lengths(rows: Tensor, columns: Columns) -> Tensor:
    """The length of each row, in float64, whatever the number of processes that have its columns."""
    squares = [rows[:, piece].to(torch.float64, copy=True).square_().sum(1) for piece in columns.pieces()]
    zero = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    return columns.add_up(zero, squares).sqrt()


def _extremes(rows: Tensor) -> tuple[Tensor, ...]:
    """The least and the greatest number of each row; a device reads the rows only once."""
    return (rows.amin(1), rows.amax(1)) if rows.device.type == "cpu" else tuple(torch.aminmax(rows, dim=1))


def _of_rows(found: Callable[[Tensor], tuple[Tensor, ...]], parts: Sequence[Tensor]) -> list[Tensor]:
    """A number for each row of all parts, one call for all where they lie in one memory."""
    if len(parts) == 1:
        return list(found(parts[0]))
    shared = one_memory(parts) if len(parts[0]) else None
    if shared is None or len(shared[0]) > 2 * len(parts) * len(parts[0]):  # mostly of others
        return [torch.cat(of_all) for of_all in zip(*map(found, parts), strict=True)]
    rows, starts = shared
    wanted = to_device((starts[:, None] + torch.arange(len(parts[0]))).flatten(), rows.device)
    return [numbers[wanted] for numbers in found(rows)]


def _on_host(several: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The same masks; those on a device have come in one copy."""
    far = [mask for masks in several for mask in masks.values() if mask.device.type != "cpu"]
    near = iter(torch.cat(far).cpu().split([len(mask) for mask in far]) if far else ())
    return [
        {fault: mask if mask.device.type == "cpu" else next(near) for fault, mask in masks.items()}
        for masks in several
    ]
