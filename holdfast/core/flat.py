"""A model is one vector: its parameters first, then its buffers (BatchNorm's running statistics), each with a
named place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """Where one named tensor lies in the vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    dtype: torch.dtype
    buffer: bool
    frozen: bool


@dataclass(frozen=True)
class Layout:
    """The places of all tensors of a module; two modules of the same architecture have equal layouts."""

    slots: tuple[Slot, ...]
    head: str | None = None
    """Which submodule is the head, where there is one."""

    @classmethod
    def of(cls, module: nn.Module, head: str | None = None) -> Layout:
        slots, start = [], 0
        named: list[tuple[str, Tensor, bool]] = [(name, p, False) for name, p in module.named_parameters()]
        saved = (
            module.state_dict().keys()
        )  # what a module does not save is a constant of its own: it is neither trained nor sent
        named += [(name, b, True) for name, b in module.named_buffers() if name in saved]
        for name, tensor, buffer in named:
            stop = start + tensor.numel()
            slots.append(
                Slot(
                    name,
                    tuple(tensor.shape),
                    start,
                    stop,
                    tensor.dtype,
                    buffer,
                    not buffer and not tensor.requires_grad,
                )
            )
            start = stop
        return cls(tuple(slots), head)

    @cached_property
    def size(self) -> int:
        return self.slots[-1].stop if self.slots else 0

    @cached_property
    def parameters(self) -> int:
        """How many of the vector's entries are parameters; the rest are buffers."""
        return sum(slot.stop - slot.start for slot in self.slots if not slot.buffer)

    @cached_property
    def trainable(self) -> Tensor:
        """bool[size]: parameters that the module itself does not freeze."""
        return self.mask(lambda slot: not slot.buffer and not slot.frozen)

    def mask(self, chosen: Callable[[Slot], bool]) -> Tensor:
        """bool[size], true where the slot is chosen."""
        out = torch.zeros(self.size, dtype=torch.bool)
        for slot in self.slots:
            out[slot.start : slot.stop] = chosen(slot)
        return out

    def under(self, prefix: str) -> Tensor:
        """bool[size] of one submodule's tensors (or one tensor)."""
        return self.mask(lambda slot: slot.name == prefix or slot.name.startswith(prefix + "."))

    def slot(self, name: str) -> Slot:
        return next(slot for slot in self.slots if slot.name == name)

    def flatten(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Named tensors, each with the same leading axes, as [..., size]."""
        first = tensors[self.slots[0].name]
        lead = first.shape[: first.ndim - len(self.slots[0].shape)]
        kind = dtype or first.dtype
        return torch.cat([tensors[s.name].reshape(*lead, -1).to(kind) for s in self.slots], dim=-1)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Named views of [..., size] in the vector's own dtype."""
        lead = vector.shape[:-1]
        return {s.name: vector[..., s.start : s.stop].view((*lead, *s.shape)) for s in self.slots}

    def split(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """A model's parameters and its buffers: [..., size] in two parts."""
        return vector[..., : self.parameters], vector[..., self.parameters :]

    def tensors(self, vector: Tensor) -> dict[str, Tensor]:
        """The same as a module wants them: whole numbers (counters, tables of indices) in their own dtype,
        rounded after an average."""
        views = self.unflatten(vector)
        return {
            s.name: views[s.name] if s.dtype.is_floating_point else views[s.name].round().to(s.dtype)
            for s in self.slots
        }


@dataclass(frozen=True)
class Wire:
    """Which entries of a model travel, compactly: shared parameters first, then shared buffers."""

    index: Tensor
    parameters: int
    whole: bool
    model: Layout
    """Of the whole model: a schema may name fields by the shape of a layer."""
    _there: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)
    """The index on devices, where it travelled once."""

    @classmethod
    def of(cls, layout: Layout, shared: Tensor) -> Wire:
        index = shared.nonzero().flatten()
        return cls(index, int(shared[: layout.parameters].sum()), bool(shared.all()), layout)

    @property
    def size(self) -> int:
        return self.index.shape[0]

    @property
    def buffers(self) -> int:
        return self.size - self.parameters

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._there:
            self._there[device] = self.index.to(device)
        return self._there[device]

    def layout(self, whole: Layout) -> Layout:
        """Where each tensor's travelling entries lie among the parameters that travel; for rules that go
        layer by layer."""
        return self._own_layout if whole is self.model else self._layout_of(whole)

    @cached_property
    def _own_layout(self) -> Layout:
        return self._layout_of(self.model)

    def _layout_of(self, whole: Layout) -> Layout:
        shared = torch.zeros(whole.size, dtype=torch.bool)
        shared[self.index] = True
        slots, start = [], 0
        for slot in whole.slots:
            size = int(shared[slot.start : slot.stop].sum())
            if size and not slot.buffer:
                shape = (
                    slot.shape if size == slot.stop - slot.start else (size, *(1 for _ in slot.shape[1:]))
                )  # still a matrix, say
                slots.append(replace(slot, shape=shape, start=start, stop=start + size))
                start += size
        return replace(whole, slots=tuple(slots))

    def split(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """The parameters and the buffers of what travels: [..., size] in two parts."""
        return sent[..., : self.parameters], sent[..., self.parameters :]

    def moved(self, start: Tensor, update: Tensor, buffers: Tensor) -> Tensor:
        """Models as they travel: `start` moved by these updates, with the buffers that came with them."""
        return torch.cat([self.split(start)[0] + update, buffers], dim=-1)

    def pack(self, model: Tensor) -> Tensor:
        """[..., size of the model] to [..., what travels]."""
        return model if self.whole else model[..., self._on(model.device)]

    def unpack(self, sent: Tensor, own: Tensor) -> Tensor:
        """The model with the travelling entries replaced by what was sent."""
        if self.whole:
            return sent
        out = own.clone()
        out[..., self._on(own.device)] = sent
        return out
