"""One training step of a stack as a program of fixed shape, which is traced once, compiled or captured once,
and replayed for every step.

A GPU computes the small step of a client faster than Python can launch it. Therefore everything that a step
reads and writes has a fixed address: the rows' tensors, their numbers, and one tensor with what differs from
step to step. On a CPU nothing is captured: the same step runs as plain Python, and is tested that way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from holdfast.core.device import Precision
from holdfast.core.keys import Key
from holdfast.local.augment import Augment
from holdfast.local.compiled_code import Traced, compiled
from holdfast.local.function_identity import identity, same
from holdfast.local.gradients import Stacked, Tensors, apply_step
from holdfast.local.lanes import stream_of
from holdfast.local.losses import Batch
from holdfast.local.per_sample import stacked_gradients
from holdfast.local.row_numbers import is_zero, laid_out_as
from holdfast.local.stack import Stack
from holdfast.local.update import Update
from holdfast.models.batched_convolution import DECOMPOSITIONS, as_products
from holdfast.models.normalisation import own_formulas
from holdfast.models.stacked_convolution.use import choices_for

_WARM_UP = 3  # runs before a capture; libraries choose their kernels and buffers in the first runs


@dataclass(frozen=True)
class Structure:
    """Everything a program depends on: stacks with equal structures are trained by the same program."""

    signature: str
    draws: bool
    """Whether functions of the model or the loss draw by key."""
    dtype: torch.dtype
    device: torch.device
    store: int
    functions: Any
    """The loss and the step, in the form in which `same` compares them."""
    augment: Augment
    batch_size: int
    full: bool
    """Whether no batch is padded."""
    wanted: tuple[str, ...]
    partly: bool
    optimizer: Any
    """The optimiser, in the form in which `identity` compares it."""
    buffers: tuple[str, ...]
    """What it keeps for each parameter."""
    decay: bool
    pull: bool
    clip: bool
    scheduled: bool
    aux: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    size: int
    plan: str
    precision: Precision
    lane: int = 0
    """Its place among programs of one row that replay side by side."""

    @property
    def alone(self) -> bool:
        return self.plan.endswith("-loop")

    @property
    def compiled(self) -> bool:
        return self.plan.startswith("compiled")

    @classmethod
    def of(cls, stack: Stack, size: int, name: str, precision: Precision) -> Structure:
        network, recipe = stack.network, stack.recipe
        wanted, partly = stack.trained()
        numbers, alone = stack.numbers, name.endswith("-loop")
        # a stacked program always has weight decay and a pull, which may be 0, so that many methods share it
        decay = not alone or not is_zero(numbers.weight_decay)
        pull = not alone or (stack.target is not None and not is_zero(numbers.pull))
        aux = tuple((key, tuple(value.shape[1:]), value.dtype) for key, value in sorted(stack.aux.items()))
        return cls(
            network.signature,
            network.draws,
            network.dtype,
            stack.model.device,
            id(stack.samples),
            same((recipe.loss, stack.step)),
            recipe.augment,
            recipe.batch_size,
            stack.full,
            tuple(wanted),
            partly,
            identity(recipe.optimizer),
            stack.buffers(),
            decay,
            pull,
            numbers.clip is not None,
            recipe.schedule is not None,
            aux,
            size,
            name,
            precision,
        )


class Program:
    """A training step with its memory: `load` rows, call `step` for each of their steps, `unload` them."""

    def __init__(
        self,
        structure: Structure,
        stack: Stack,
        traced: Traced | None = None,
        ready: bool = True,
        like: Program | None = None,
    ):
        """`traced` is the step, where it has been traced before, and `like` a program with the same step in
        another lane, whose code is used; a program that is not made `ready` can only be traced."""
        self._traced, self._like = traced, like
        self.structure, self.samples, self.rule = structure, stack.samples, stack.recipe.optimizer
        network, loss, step = stack.network, stack.recipe.loss, stack.step
        s, slots = structure, {slot.name: slot for slot in network.layout.slots}

        def room(*shape: int, dtype: torch.dtype = s.dtype) -> Tensor:
            return torch.zeros(s.size, *shape, dtype=dtype, device=s.device)

        self.memory: Tensors = {}
        for slot in slots.values():
            whole = slot.dtype if not slot.dtype.is_floating_point else s.dtype
            self.memory[f"{'buffers' if slot.buffer else 'params'}.{slot.name}"] = room(
                *slot.shape, dtype=whole
            )
        for name in s.wanted:
            if s.pull:
                self.memory[f"targets.{name}"] = room(*slots[name].shape)
            self.memory |= {f"state.{buffer}.{name}": room(*slots[name].shape) for buffer in s.buffers}
            if s.partly:
                self.memory[f"masks.{name}"] = room(*slots[name].shape, dtype=torch.bool)
        self.memory |= {f"aux.{name}": room(*shape, dtype=dtype) for name, shape, dtype in s.aux}
        numbers = ["lr", "momentum", "decay", "pull", *(["clip"] if s.clip else [])]
        self.memory |= {f"number.{name}": room() for name in numbers} | {"losses": room()}
        if self.rule.counts:
            self.memory["count"] = room(dtype=torch.int64)
        if s.scheduled:
            self.memory["factor"] = room()
        self.memory["now"] = room(2 * s.batch_size + 4, dtype=torch.int64)
        self._order = torch.contiguous_format
        self._stepper = stacked_gradients(network, loss, s.precision, stack.recipe)
        self._run = apply_step(network, loss, step, s.precision) if step else None
        self.graph: torch.cuda.CUDAGraph | None = None
        if ready:
            self._make_ready()
            self._like = None

    def _make_ready(self) -> None:
        if self.structure.device.type == "cuda":
            self._run_once = self._advance()  # kept: the graph reads tensors that the compiled code may own
            lane = stream_of(self.structure.device, self.structure.lane) if self.structure.alone else None
            self.graph = _captured(self._run_once, self.structure.device, lane)
            self.replay: Callable[[], None] = self.graph.replay
        else:
            self.replay = self._advance()

    def load(self, rows: int, tensors: Tensors) -> None:
        """Copy these rows' tensors into the memory; the remaining places are unused and never active."""
        self.memory["losses"].zero_()
        self.memory["now"].zero_()
        here = [name for name in tensors if name in self.memory]
        torch._foreach_copy_([self.memory[name][:rows] for name in here], [tensors[name] for name in here])

    def step(self, now: Tensor, factor: Tensor | None = None) -> None:
        """Take a step; `factor` is what a schedule makes of each row's learning rate in this step."""
        self.memory["now"][: len(now)].copy_(now)
        if factor is not None:
            self.memory["factor"][: len(factor)].copy_(factor)
        self.replay()

    def unload(self, rows: int) -> Tensors:
        """Return copies of the tensors that may have changed."""
        return {name: self.memory[name][:rows].clone() for name in self._written}

    @cached_property
    def _written(self) -> list[str]:
        changed = ("params.", "buffers.", "state.", "count", "losses")
        return [
            name
            for name in self.memory
            if name.startswith(changed) and (name[7:] in self.structure.wanted or name[:7] != "params.")
        ]

    def traced(self) -> torch.fx.GraphModule:
        """Return the step, of a single row its gradients, as a list of tensor operations, without the Python
        code of the model, the loss and the update."""
        s = self.structure
        if not s.alone:
            with as_products(choices_for(s.device, s.precision, s.dtype)):
                return _traced(self._step, self.memory)
        try:
            self._lay_out(torch.channels_last)
            return _traced(partial(self._gradients_alone, innermost=True), *self._inputs_alone())
        except RuntimeError:  # a user's x.view(len(x), -1) depends on PyTorch's own order
            self._lay_out(torch.contiguous_format)
            return _traced(self._gradients_alone, *self._inputs_alone())

    def _lay_out(self, order: torch.memory_format) -> None:
        """Put the tensors of the single row's convolutions into this order in memory: cuDNN reads weights and
        returns their gradients with channels innermost, and would copy both in every step."""
        self._order = order
        for name, value in self.memory.items():
            if value.ndim == 5:
                self.memory[name] = value[0].contiguous(memory_format=order)[None]

    def _advance(self) -> Callable[[], None]:
        compiles = self.structure.compiled and self.structure.device.type == "cuda"
        if self.structure.alone:
            self._code: Callable[..., Any] = self._gradients_alone
            if self._like is not None:
                self._lay_out(self._like._order)
                self._code = self._like._code
            elif compiles and self._run is None:
                traced = Traced.of(self.traced())
                self._code = compiled(traced, self.structure.device, self.structure.precision)
            return partial(self._step_alone, self._code)
        step: Callable[[Tensors], Tensors] = self._step
        if compiles:
            traced = self._traced or Traced.of(self.traced())
            step = compiled(traced, self.structure.device, self.structure.precision)
            self._traced = None

        def run() -> None:
            fresh = step(self.memory)
            torch._foreach_copy_([self.memory[name] for name in fresh], list(fresh.values()))

        return run

    def _step(self, memory: Tensors) -> Tensors:
        """Compute a whole step as a pure function with new tensors; finished rows keep their values."""
        s = self.structure
        batch, active, dropout = self._batch(memory)
        params, buffers = (
            _under(memory, "params."),
            {name: value.clone() for name, value in _under(memory, "buffers.").items()},
        )
        masks, state = _under(memory, "masks."), _under(memory, "state.")
        old = [params[name] for name in s.wanted]
        if self._run is not None:
            new, buffers, value = Stacked.run(
                torch.func.vmap(self._run), params, buffers, batch, dropout, _lr(memory)
            )
            fresh = [
                torch.where(masks[name], new[name], params[name]) if s.partly else new[name]
                for name in s.wanted
            ]
            changed: Tensors = {}
        else:
            grads, value = self._stepper.gradients(list(s.wanted), params, buffers, batch, dropout, s.full)
            changed = {f"state.{name}": tensor.clone() for name, tensor in state.items()}
            if self.rule.counts:
                changed["count"] = memory["count"].clone()
            fresh = [tensor.clone() for tensor in old]
            self._update(memory | changed).apply(fresh, grads)
        out = {f"params.{name}": tensor for name, tensor in zip(s.wanted, fresh, strict=True)}
        out |= {f"buffers.{name}": tensor for name, tensor in buffers.items()} | changed
        out["losses"] = memory["losses"] + value
        return {
            k: torch.where(active.view(-1, *[1] * (v.ndim - 1)), v.detach().to(memory[k].dtype), memory[k])
            for k, v in out.items()
        }

    def _step_alone(self, gradients: Callable[..., tuple[list[Tensor], Tensor, Tensors]]) -> None:
        """Compute the step of a single row in place; it is replayed only while the row still trains."""
        s = self.structure
        params, buffers, batch, dropout = self._inputs_alone()
        own = {name: value[0] for name, value in self.memory.items()}
        if self._run is not None:
            new, fresh, value = self._run(params, buffers, batch, dropout, _lr(own))
            for name in s.wanted:
                params[name].copy_(
                    torch.where(own[f"masks.{name}"], new[name], params[name]) if s.partly else new[name]
                )
        else:
            grads, value, fresh = gradients(params, buffers, batch, dropout)
            moved = [params[name] for name in s.wanted]
            grads = [laid_out_as(grad, param) for grad, param in zip(grads, moved, strict=True)]
            self._update(own).apply(moved, grads)
        for name, tensor in fresh.items():
            buffers[name].copy_(tensor)
        self.memory["losses"][0].add_(value.detach())

    def _inputs_alone(self) -> tuple[Tensors, Tensors, Batch, Tensor]:
        """Return the single row's tensors without the leading axis."""
        own = {name: value[0] for name, value in self.memory.items()}
        batch, _, dropout = self._batch(self.memory)
        first = Batch(
            batch.x[0], batch.y[0], batch.mask[0], {name: value[0] for name, value in batch.aux.items()}
        )
        return _under(own, "params."), _under(own, "buffers."), first, dropout[0]

    def _gradients_alone(
        self, params: Tensors, buffers: Tensors, batch: Batch, key: Tensor, innermost: bool = False
    ) -> tuple[list[Tensor], Tensor, Tensors]:
        """Return gradients, loss and new buffers. Convolutions of one client are those of cuDNN, which are
        made for images with their channels innermost and copies others before and after."""
        if innermost and batch.x.ndim == 4:
            batch = batch._replace(x=batch.x.contiguous(memory_format=torch.channels_last))
        fresh = {name: tensor.clone() for name, tensor in buffers.items()}
        grads, value = self._stepper.gradients(
            list(self.structure.wanted), params, fresh, batch, key, self.structure.full, alone=True
        )
        return grads, value, fresh

    def _batch(self, memory: Tensors) -> tuple[Batch, Tensor, Tensor]:
        """Return the samples of this step, which rows are still training, and their keys for Dropout."""
        s, size = self.structure, self.structure.batch_size
        now = memory["now"]
        count, active, dropout, augment = now[:, 2 * size :].unbind(1)
        x = self.samples.batch(now[:, :size], dtype=s.dtype)
        if s.augment.active:
            x = s.augment(x, Key(augment))
        mask = (torch.arange(size, device=now.device) < count[:, None]).to(s.dtype)
        return Batch(x, now[:, size : 2 * size], mask, _under(memory, "aux.")), active > 0, dropout

    def _update(self, memory: Tensors) -> Update:
        s, number = self.structure, _under(memory, "number.")
        targets, masks = _under(memory, "targets."), _under(memory, "masks.")
        return Update(
            self.rule,
            _lr(memory),
            number["momentum"],
            number["decay"] if s.decay else 0.0,
            number["pull"] if s.pull else 0.0,
            number["clip"] if s.clip else None,
            {buffer: [memory[f"state.{buffer}.{name}"] for name in s.wanted] for buffer in s.buffers},
            memory.get("count"),
            [targets[name] for name in s.wanted] if s.pull else None,
            [masks[name] for name in s.wanted] if s.partly else None,
            s.alone,
        )


def _lr(memory: Tensors) -> Tensor:
    return memory["number.lr"] * memory["factor"] if "factor" in memory else memory["number.lr"]


def _captured(
    run: Callable[[], None], device: torch.device, stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """Capture the kernels of one run as a CUDA graph, on a stream of its own if one is given."""
    with torch.cuda.device(device):
        aside, now = stream or torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(now)
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                run()
        now.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # the outer context restores the stream, because a capture that fails may leave its own stream current
        # only this thread's calls count: the one that saves a round may give back pinned memory meanwhile
        with (
            torch.cuda.stream(now),
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            run()
    return graph


def _traced(function: Callable[..., Any], *inputs: Any) -> torch.fx.GraphModule:
    with own_formulas():
        return make_fx(lambda *given: function(*given), DECOMPOSITIONS, "fake", _allow_non_fake_inputs=True)(
            *inputs
        )


def _under(memory: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): value for name, value in memory.items() if name.startswith(prefix)}
