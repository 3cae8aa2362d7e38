"""GroupNorm and BatchNorm by our own formulas give what PyTorch's layers give, in every memory order, in
stacks, and with the gradients of autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from holdfast.models.normalisation import group_norm, masked_batch_norm, own_formulas

SHAPES = {"vectors": (4, 6), "signals": (4, 6, 5), "images": (4, 6, 3, 5)}


def inputs(shape: tuple[int, ...], *before: int) -> tuple[Tensor, Tensor, Tensor]:
    luck = torch.Generator().manual_seed(0)
    x = 3 + torch.randn(*before, *shape, generator=luck, dtype=torch.float64)
    weight, bias = torch.randn(2, *before, shape[1], generator=luck, dtype=torch.float64)
    return x, weight, bias


def slopes(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves, retain_graph=True)]


def same(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def batch_norm_by_autograd(
    x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The slow reference: statistics over the rows that the mask leaves."""
    real, axes = x[mask > 0], [0, *range(2, x.ndim)]
    mean, var = real.mean(axes), real.var(axes, correction=0)
    view = [1, -1, *[1] * (x.ndim - 2)]
    out = (x - mean.view(view)) / (var.view(view) + 1e-5).sqrt() * weight.view(view) + bias.view(view)
    return out, mean, var


@pytest.mark.parametrize("form", [nullcontext, own_formulas])
@pytest.mark.parametrize("innermost", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_group_norm_equals_pytorchs(
    shape: tuple[int, ...], innermost: bool, form: Callable[[], AbstractContextManager[None]]
) -> None:
    x, weight, bias = inputs(shape)
    if innermost:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    with form():
        out, bare = group_norm(x, 2, weight, bias, 1e-5), group_norm(x, 3, None, None, 1e-5)
    assert out.stride() == x.stride(), "nothing is copied into another order"
    same(slopes(out, leaves), slopes(F.group_norm(x, 2, weight, bias, 1e-5), leaves))
    same(slopes(bare, [x]), slopes(F.group_norm(x, 3, None, None, 1e-5), [x]))


@pytest.mark.parametrize("mask", [[1, 1, 1, 1], [1, 1, 0, 1], [1, 0, 0, 0]])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_batch_norm_counts_real_samples_only(shape: tuple[int, ...], mask: list[int]) -> None:
    x, weight, bias = inputs(shape)
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    real = torch.tensor(mask, dtype=torch.float64)
    want, mean, var = batch_norm_by_autograd(x, real, weight, bias)
    out, *statistics = masked_batch_norm(x, real, weight, bias, 1e-5)
    same(slopes(out, leaves), slopes(want, leaves))
    same(statistics, [mean.detach(), var.detach()])
    if all(mask):
        whole, *_ = masked_batch_norm(x, None, weight, bias, 1e-5)
        same(slopes(whole, leaves), slopes(want, leaves))


def test_second_derivatives_are_those_of_pytorch() -> None:
    x, weight, bias = inputs((3, 4, 5))
    groups = [
        lambda *own: group_norm(own[0], 2, *own[1:], 1e-5),
        lambda *own: F.group_norm(own[0], 2, *own[1:]),
    ]
    real = torch.tensor([1.0, 0, 1], dtype=torch.float64)
    batches: list[Any] = [
        lambda *own: masked_batch_norm(own[0], real, *own[1:], 1e-5)[0],
        lambda *own: batch_norm_by_autograd(own[0], real, *own[1:])[0],
    ]
    for mine, theirs in (groups, batches):
        found = []
        for function in (mine, theirs):
            leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
            first = torch.autograd.grad(function(*leaves).sin().sum(), leaves, create_graph=True)
            found.append(list(torch.autograd.grad(sum(each.cos().sum() for each in first), leaves[:2])))
        same(*found)


@pytest.mark.parametrize("form", [nullcontext, own_formulas])
@pytest.mark.parametrize("inside", [False, True], ids=["gradient of a stack", "gradient inside of vmap"])
def test_both_work_in_a_stack(inside: bool, form: Callable[[], AbstractContextManager[None]]) -> None:
    x, weight, bias = inputs((4, 6, 3, 5), 3)
    masks = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.float64)
    for function in (
        lambda x, w, b, m: group_norm(x, 2, w, b, 1e-5),
        lambda x, w, b, m: masked_batch_norm(x, m, w, b, 1e-5)[0],
    ):
        slope = grad(lambda *own, f=function: f(*own).sin().sum(), argnums=(0, 1, 2))
        alone = [slope(x[i], weight[i], bias[i], masks[i]) for i in range(3)]
        leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
        with form():
            if inside:
                got = vmap(slope)(x, weight, bias, masks)
            else:
                got = torch.autograd.grad(vmap(function)(*leaves, masks).sin().sum(), leaves)
        same(list(got), [torch.stack(each) for each in zip(*alone, strict=True)])


def test_in_bfloat16_statistics_and_gradients_of_weights_are_float32() -> None:
    x, weight, bias = (each.float() for each in inputs((4, 6, 3, 5)))
    leaves = [x.bfloat16().requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    exact = [leaves[0].detach().float().requires_grad_(), weight, bias]
    for function in (
        lambda x, w, b: group_norm(x, 2, w, b, 1e-5),
        lambda x, w, b: masked_batch_norm(x, None, w, b, 1e-5)[0],
    ):
        out, want = function(*leaves), function(*exact)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, want.bfloat16(), rtol=0, atol=0)  # rounded once, at the end
        mine, theirs = (
            torch.autograd.grad(each.float().square().sum(), all_)
            for each, all_ in ((out, leaves), (want, exact))
        )
        assert [each.dtype for each in mine] == [torch.bfloat16, torch.float32, torch.float32]
        for a, b in zip(mine, theirs, strict=True):
            assert float((a.float() - b).abs().max()) < 0.02 * float(b.abs().max()) + 0.02
