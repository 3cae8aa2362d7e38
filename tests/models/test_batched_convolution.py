"""Layers with a form of their own for stacks give what vmap by itself gives, forwards and backwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from holdfast.models.batched_convolution import (
    DECOMPOSITIONS,
    FoldedConv2d,
    FoldedMaxPool2d,
    as_products,
    batch_norm,
    folded,
    unfolded,
)
from holdfast.models.network import Network

N, BATCH = 3, 4
LAYERS = {
    "conv": nn.Conv2d(2, 6, 3),
    "conv without bias": nn.Conv2d(2, 6, 3, bias=False),
    "conv with stride, padding, dilation": nn.Conv2d(2, 4, 3, stride=2, padding=2, dilation=2),
    "conv with groups": nn.Conv2d(2, 4, 3, groups=2),
    "conv padded to the same size": nn.Conv2d(2, 4, 3, padding="same"),
    "conv padded by reflection": nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"),
    "pool": nn.MaxPool2d(2),
    "pool with padding and a part of a window": nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
    "conv and pool": nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 2, 2), nn.MaxPool2d(2)
    ),
    "group norm between": nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)),
}


def stacked(module: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs of n differently initialised copies on x [n, ...], and the gradients of a sum of theirs for x
    and all parameters."""
    torch.manual_seed(0)
    copies = [copy.deepcopy(module) for _ in range(N)]
    for each in copies:
        for p in each.parameters():
            nn.init.normal_(p)
    params, _ = stack_module_state(copies)
    leaves = [x.clone().requires_grad_(), *params.values()]
    out = vmap(lambda p, own: functional_call(module, p, (own,)))(params, leaves[0])
    weights = torch.randn(out.shape, dtype=out.dtype)
    return out, list(torch.autograd.grad((out * weights).sum(), leaves))


@pytest.mark.parametrize("form", [nullcontext, as_products])
@pytest.mark.parametrize("name", LAYERS)
def test_a_folded_layer_equals_vmap(name: str, form: Callable[[], AbstractContextManager[None]]) -> None:
    plain = copy.deepcopy(LAYERS[name]).double()
    quick = copy.deepcopy(plain)
    for layer in quick.modules():
        folded(layer)
    x = torch.randn(N, BATCH, 2, 9, 9, dtype=torch.float64)
    expected, expected_grads = stacked(plain, x)
    with form():
        out, grads = stacked(quick, x)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("size", "kernel", "dilation", "padding", "stride"),
    [
        ((14, 14), (5, 5), (1, 1), (0, 0), (1, 1)),
        ((9, 11), (3, 2), (2, 1), (1, 2), (2, 3)),
        ((7, 7), (2, 2), (1, 1), (0, 0), (2, 2)),
    ],
)
def test_patches_fold_back_as_pytorch_does_it(
    size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any
) -> None:
    patches = torch.randn_like(
        F.unfold(torch.zeros(4, 3, *size, dtype=torch.float64), kernel, dilation, padding, stride)
    )
    expected = F.fold(patches, size, kernel, dilation, padding, stride)
    quick = DECOMPOSITIONS[torch.ops.aten.col2im.default](
        patches, [*size], [*kernel], [*dilation], [*padding], [*stride]
    )
    torch.testing.assert_close(quick, expected, rtol=0, atol=1e-12)


def test_a_shared_weight_and_a_gradient_inside_of_vmap() -> None:
    """Neither happens in `fit` by default; a user's step function or loss may do both."""
    plain = nn.Conv2d(2, 3, 3).double()
    quick = folded(copy.deepcopy(plain))
    x = torch.randn(N, BATCH, 2, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(vmap(quick)(x), vmap(plain)(x), rtol=1e-10, atol=1e-10)

    def slope(net: nn.Module, own: Tensor) -> Tensor:
        return grad(lambda w: functional_call(net, {"weight": w}, (own,)).square().sum())(net.weight)

    torch.testing.assert_close(
        vmap(lambda own: slope(quick, own))(x), vmap(lambda own: slope(plain, own))(x), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_a_stack_updates_every_clients_statistics(training: bool) -> None:
    x = torch.randn(N, BATCH, 2, 5, 5, dtype=torch.float64)
    mean, var, weight, bias = (torch.rand(N, 2, dtype=torch.float64) + 0.5 for _ in range(4))
    expected_mean, expected_var = mean.clone(), var.clone()
    expected = torch.stack(
        [
            nn.functional.batch_norm(
                x[i], expected_mean[i], expected_var[i], weight[i], bias[i], training, 0.1, 1e-5
            )
            for i in range(N)
        ]
    )
    out = vmap(lambda *own: batch_norm(*own, training, 0.1, 1e-5))(x, mean, var, weight, bias)
    for mine, theirs in ((out, expected), (mean, expected_mean), (var, expected_var)):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_only_pytorchs_own_layers_are_changed_and_can_be_changed_back() -> None:
    class Mine(nn.Conv2d):
        pass

    assert type(folded(Mine(1, 1, 1))) is Mine
    assert type(folded(nn.MaxPool2d(2, return_indices=True))) is nn.MaxPool2d
    assert (
        type(folded(nn.Conv2d(1, 1, 1))) is FoldedConv2d and type(folded(nn.MaxPool2d(2))) is FoldedMaxPool2d
    )
    assert type(unfolded(folded(nn.Conv2d(1, 1, 1)))) is nn.Conv2d


def test_work_that_fails_in_channels_last_order_is_repeated_in_pytorchs_order() -> None:
    network = Network(lambda: nn.Conv2d(2, 3, 3), head=None)
    x = torch.randn(4, 2, 5, 5)
    assert network.ordered(x).is_contiguous(memory_format=torch.channels_last)
    seen = network.attempt(lambda: network.module(network.ordered(x)).view(4, -1).shape, stacked=False)
    assert seen == (4, 27)
    assert not network.innermost and network.ordered(x).is_contiguous()
    assert network.folded and type(network.module) is FoldedConv2d  # stacks are another matter
    for stacked in (False, True):
        with pytest.raises(RuntimeError, match="for good"):
            network.attempt(_fail, stacked)
    assert not network.folded and type(network.module) is nn.Conv2d


def _fail() -> None:
    raise RuntimeError("for good")
