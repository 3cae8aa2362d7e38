"""Copies of tensors in the memory of the host, made while their owner goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from holdfast.core.device import PINNED
from holdfast.core.types import State


class HostCopy:
    """A copy of some tensors. From a GPU it goes to page-locked memory, and is there only after `wait`.

    It is made, waited for and forgotten in the thread that uses the GPU: while that thread captures a
    program, no other may call the GPU. Other threads only read it."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors: State = {name: _copied(value.detach()) for name, value in tensors.items()}
        self._streams = [
            torch.cuda.current_stream(device).record_event()
            for device in {value.device for value in tensors.values() if value.is_cuda}
        ]
        self.size = sum(value.nbytes for value in self.tensors.values())

    def wait(self) -> State:
        """The tensors, which are contiguous and share no memory."""
        while self._streams:
            self._streams[-1].synchronize()
            self._streams.pop()
        return self.tensors


def _copied(value: Tensor) -> Tensor:
    if value.is_cuda and value.nbytes <= PINNED:
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
    return value.cpu().clone(memory_format=torch.contiguous_format)
