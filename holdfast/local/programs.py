"""Train by replaying programs: choose the program for some rows, and move rows between programs of different
sizes."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.types import State
from holdfast.data.federation import Samples
from holdfast.local.compiled_code import Traced, compiling_anew, has_code
from holdfast.local.function_identity import HoldsTensors
from holdfast.local.gradients import Tensors, no_luck
from holdfast.local.lanes import lanes, side_by_side
from holdfast.local.plan import Plan
from holdfast.local.program import Program, Structure
from holdfast.local.row_numbers import PerRow
from holdfast.local.stack import Stack
from holdfast.models.stacked_convolution.use import KernelFailed, give_up

Result = TypeVar("Result")
_log = logging.getLogger("holdfast.local")
_MOST = 32  # programs that are kept; each holds its rows' tensors, and all are freed when memory is short
_programs: OrderedDict[Structure, Program] = OrderedDict()
_traced: OrderedDict[Structure, tuple[Samples, Traced]] = OrderedDict()
"""Steps that were traced before a program was asked for, and the samples that they read: while these are
kept, no others have their id, by which a structure names them."""
_refused: dict[Structure, str] = {}
_said: set[str] = set()
_count = 0


class CannotReplay(Exception):
    """The step cannot be traced, compiled or captured."""


def replay(stack: Stack, rows: Tensor, plan: Plan) -> tuple[Tensor, Tensor, State]:
    """Train these rows, sorted by falling number of steps; return models [m, size], summed losses [m] and,
    where it is kept, the optimiser's state."""
    rule = stack.numbers.rule
    if not rule.by_row:
        reason = f"optimizer '{rule.name}' keeps its state itself"
        _say_once(f"plan {plan.name} cannot replay a step ({reason}); the next best plan does")
        raise _refusal(reason)
    tensors = _tensors(stack, rows)
    train = _train_together if plan.stacked else _train_each
    out = train(stack, rows, plan, tensors)
    layout = stack.network.layout
    named = {slot.name: out[f"{'buffers' if slot.buffer else 'params'}.{slot.name}"] for slot in layout.slots}
    wanted = stack.trained()[0]
    buffers = {name: [out[f"state.{name}.{key}"] for key in wanted] for name in stack.buffers()}
    return layout.flatten(named), out["losses"], stack.state_after(wanted, buffers, out.get("count"))


def _train_together(stack: Stack, rows: Tensor, plan: Plan, tensors: Tensors) -> Tensors:
    """Train all rows in one program; rows that train longer move to a smaller one where the plan has one."""
    steps = stack.order.steps[stack.owner(rows).numpy()]
    now, factors = stack.written_out(rows), stack.factors_of(rows)
    out, before = (
        tensors | {"losses": torch.zeros(len(rows), dtype=stack.network.dtype, device=stack.model.device)},
        0,
    )
    for m, until in _segments(steps.tolist(), plan):
        program = _program(stack, plan.size(m), plan)
        program.load(m, {name: value[:m] for name, value in out.items()})
        for t in range(before, until):
            program.step(next(now)[:m], None if factors is None else factors[t, :m])
        before = until
        for name, value in program.unload(m).items():
            out[name] = torch.cat([value, out[name][m:]]) if m < len(rows) else value
    return out


def _segments(steps: list[int], plan: Plan) -> Iterator[tuple[int, int]]:
    """Yield pairs (rows, last step): the first rows train together until that step. A new segment begins only
    where a smaller program can be used."""
    if not steps or not steps[0]:
        return
    m, size = len(steps), plan.size(len(steps))
    for t in range(1, steps[0]):
        active = sum(1 for count in steps if count > t)
        smaller = plan.size(active) if plan.sizes else size
        if smaller < size:
            yield m, t
            m, size = active, smaller
    yield m, steps[0]


def _train_each(stack: Stack, rows: Tensor, plan: Plan, tensors: Tensors) -> Tensors:
    """Train row after row in programs of one row, on a GPU some of them at the same time."""
    device = stack.model.device
    own_luck = no_luck(device)
    programs = _beside(_program(stack, 1, plan), stack, lanes(len(rows), device))
    steps = stack.order.steps[stack.owner(rows).numpy()].tolist()
    factors = stack.factors_of(rows)  # before any lane begins, because all of them read these
    trained: list[Tensors] = [{} for _ in steps]

    def one_by_one(lane: int, program: Program) -> Iterator[None]:
        for i in range(lane, len(steps), len(programs)):
            program.load(1, {name: value[i : i + 1] for name, value in tensors.items()})
            now = stack.written_out(rows[i : i + 1])
            for t in range(steps[i]):
                program.step(next(now), None if factors is None else factors[t, i : i + 1])
                yield
            trained[i] = program.unload(1)

    side_by_side([one_by_one(lane, program) for lane, program in enumerate(programs)], device)
    own_luck()
    return tensors | {name: torch.cat([part[name] for part in trained]) for name in trained[0]}


def _tensors(stack: Stack, rows: Tensor) -> Tensors:
    """Return all tensors that a program loads. Without a pull, the target is the row's own start and the pull
    is 0, so that methods with and without a pull share a program."""
    params, buffers = stack.tensors(rows)
    wanted, partly = stack.trained()
    update = stack.update(rows, wanted, params, partly)
    out = {f"params.{name}": value for name, value in params.items()} | {
        f"buffers.{name}": value for name, value in buffers.items()
    }
    targets = update.targets or [params[name] for name in wanted]
    for place, name in enumerate(wanted):
        out[f"targets.{name}"] = targets[place]
        out |= {f"state.{buffer}.{name}": values[place] for buffer, values in update.state.items()}
        if update.masks is not None:
            out[f"masks.{name}"] = update.masks[place]
    if update.count is not None:
        out["count"] = update.count
    out |= {f"aux.{name}": value for name, value in stack.aux_of(rows).items()}
    numbers: dict[str, PerRow] = {
        "lr": update.lr,
        "momentum": update.momentum,
        "decay": update.weight_decay,
        "pull": update.pull,
    }
    if update.clip is not None:
        numbers["clip"] = update.clip
    device = stack.model.device
    for name, value in numbers.items():
        out[f"number.{name}"] = (
            value
            if isinstance(value, Tensor)
            else torch.full((len(rows),), value, dtype=torch.float64, device=device)
        )
    return out


def _program(stack: Stack, size: int, plan: Plan) -> Program:
    """Return the program of a structure. It is made once; the most recently used programs are kept."""
    try:
        structure = Structure.of(stack, size, plan.name, plan.precision)
    except HoldsTensors as found:
        _say_once(f"plan {plan.name} cannot run this loss or step ({found}); the next best plan does")
        raise _refusal(str(found)) from None
    if structure in _refused:
        raise _refusal(_refused[structure])
    if structure not in _programs:
        try:
            _programs[structure] = _made(structure, stack)
        except HoldfastError:
            raise
        except Exception as error:  # compilers fail in many ways, and another plan can always do the work
            cause = error.__context__ if "capture" in str(error) and error.__context__ is not None else error
            reason = (str(cause).strip() or "no reason given").splitlines()[0][:300]
            _refused[structure] = f"{type(cause).__name__}: {reason}"
            forget()
            _say_once(
                f"plan {plan.name} cannot run this model ({_refused[structure]}); the next best plan does"
            )
            raise _refusal(_refused[structure]) from error
        if len(_programs) > _MOST:
            _programs.popitem(last=False)
    _programs.move_to_end(structure)
    return _programs[structure]


def _beside(first: Program, stack: Stack, count: int) -> list[Program]:
    """Return a program and its like for further lanes, as many as fit into the memory."""
    found = [first]
    for lane in range(1, count):
        structure = replace(first.structure, lane=lane)
        if structure not in _programs:
            try:
                _programs[structure] = Program(structure, stack, like=first)
            except torch.OutOfMemoryError:
                break
        _programs.move_to_end(structure)
        found.append(_programs[structure])
    return found


def _made(structure: Structure, stack: Stack) -> Program:
    """Make a program. If memory runs out, free the others and try again: whether a program can be made
    must not depend on which were made before.

    Programs run one after the other but do not share scratch memory: with a shared pool (PyTorch 2.11, H200),
    the first training by a compiled bf16 program computed wrong gradients for some rows. The cause is not
    known; `benchmarks/equal_plans.py` shows it."""
    _, traced = _traced.pop(structure, (None, None))
    kept = structure.compiled and has_code()
    try:
        return with_room(lambda: Program(structure, stack, traced))
    except torch.OutOfMemoryError:
        raise
    except KernelFailed as error:
        give_up(error)
        return with_room(lambda: Program(structure, stack))
    except Exception:
        if not kept:
            raise
    with compiling_anew():  # the code of an earlier run may be damaged
        return Program(structure, stack)


def traced(stack: Stack, size: int, plan: Plan) -> Traced | None:
    """Trace the step of a program for these rows, which is made later; None where it cannot be traced."""
    try:
        structure = Structure.of(stack, size, plan.name, plan.precision)
        if structure not in _traced:
            step = Traced.of(Program(structure, stack, ready=False).traced())
            _traced[structure] = stack.samples, step
    except HoldfastError:
        raise
    except Exception:  # the reason is logged when the program is made
        return None
    if len(_traced) > _MOST:
        _traced.popitem(last=False)
    return _traced[structure][1]


def with_room(work: Callable[[], Result]) -> Result:
    """Do it; where memory runs out, once more without the memory of all programs. By then the error is gone,
    which would keep what the first attempt had made."""
    with suppress(torch.OutOfMemoryError):
        return work()
    forget()
    return work()


def _refusal(reason: str) -> CannotReplay:
    global _count
    _count += 1
    return CannotReplay(reason)


def _say_once(line: str) -> None:
    if line not in _said:
        _said.add(line)
        _log.warning(line)


def refusals() -> int:
    """Return how often a training could not be replayed so far."""
    return _count


def forget(network: str | None = None, but: str | None = None) -> None:
    """Free the memory of all programs, or only of the network with this signature; the programs of plan `but`
    are kept."""
    for structure in list(_programs):
        if network in (None, structure.signature) and structure.plan != but:
            del _programs[structure]
    if network is None:
        _traced.clear()  # they keep samples
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
