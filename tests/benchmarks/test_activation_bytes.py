"""What a traced step keeps: counted right, and as much as is planned, also with padded BatchNorm."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks import activation_bytes
from holdfast.local.plan import activations


def test_what_is_alive_is_counted_until_it_is_last_read() -> None:
    def step(x: Tensor) -> Tensor:
        a = x + 1  # 40 bytes
        b = a[:5].exp()  # 20, and a is read through a view
        c = b * 2  # 20, when a is gone
        return b + c  # 20

    traced = make_fx(step, tracing_mode="fake")(torch.zeros(10))
    assert activation_bytes.peak(traced) == 60
    assert (
        activation_bytes.peak(traced, but=[(10,)]) == 60 and activation_bytes.peak(traced, but=[(5,)]) == 40
    )


def test_a_stack_keeps_as_much_as_is_planned_also_with_batch_norm_on_padded_batches() -> None:
    """It was 1.3 times as much, and 1.7 times in a compiled step, before BatchNorm kept only its input."""
    kept = {}
    for name in ("cnn-bn", "cnn-gn"):
        work = replace(activation_bytes.WORKS[name], plan="captured-vmap", clients=3)
        program, network = activation_bytes.step_of(work, "fp32", full=False)
        step, _ = activation_bytes.traced_as(program)
        shapes = {tuple(p.shape) for p in network.module.parameters()}
        kept[name] = activation_bytes.peak(step, shapes | {(3, *shape) for shape in shapes})
        sample = program.samples.blank(network.dtype)
        planned = 3 * 4 * 3 * work.batch_size * (activations(network.module, sample) + sample.numel()) // 2
        assert 0.8 * planned < kept[name] < 1.2 * planned
    assert kept["cnn-bn"] < 1.05 * kept["cnn-gn"]
