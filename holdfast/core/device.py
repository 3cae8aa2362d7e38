"""Moving tensors to a device without waiting for it, and how a device computes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

Precision = Literal["fp32", "tf32", "bf16", "bf16-activations"]
PINNED = 2 << 30  # bytes of page-locked memory at a time: the system has to do without them
# read when cuBLAS is first used, so it has to be set before anything is: with it, the same work has the same
# bits
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device; from the host through pinned memory, so that the host does not wait for the
    device."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    if 0 in tensor.stride():  # an expanded tensor, one model for many clients say, travels once
        once = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
        return to_device(once.clone(memory_format=torch.contiguous_format), device).expand(tensor.shape)
    if tensor.numel() * tensor.element_size() > PINNED:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same in the host's memory; what comes from a GPU goes through page-locked memory, which is several
    times as fast."""
    return {name: _on_host(value) for name, value in tensors.items()}


def _on_host(value: Tensor) -> Tensor:
    if value.device.type == "cpu":
        return value
    if not value.is_cuda or value.numel() * value.element_size() > PINNED:
        return value.cpu()
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value.detach())


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """The context in which a model and its loss run: matrix products in bfloat16 if asked for; parameters,
    updates and sums keep their precision. What layers hand on is `models/half_activations.py`."""
    # without a cache of cast weights: in a captured step it would outlive the weights it was made from
    half = precision in ("bf16", "bf16-activations")
    return torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False)


@contextmanager
def deterministic_math(device: torch.device, precision: Precision) -> Iterator[None]:
    """Set how a CUDA device multiplies (TF32 unless fp32 is asked for), with the same bits for the same work.
    A CPU needs no such setting."""
    if device.type != "cuda":
        yield
        return
    cudnn = torch.backends.cudnn
    before = (
        cudnn.deterministic,
        cudnn.benchmark,
        cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )
    try:
        _count(
            True, False, precision != "fp32", "highest" if precision == "fp32" else "high", True, True, False
        )
        yield
    finally:
        _count(*before)


def _count(
    deterministic: bool,
    benchmark: bool,
    tf32: bool,
    matmul: str,
    algorithms: bool,
    warn_only: bool,
    fill: bool,
) -> None:
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, benchmark
    torch.backends.cudnn.allow_tf32 = tf32
    torch.set_float32_matmul_precision(matmul)
    torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
