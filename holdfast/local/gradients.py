"""Compute the gradients of a batch: for one client by plain autograd, or for a stack of clients by vmap. This
is the only difference between the two.

The loss sees an ordinary nn.Module in both cases. In a stack, `functional_call` puts each client's tensors
into the module while vmap runs it once for all. The clients' losses are independent of each other, so the
gradient of their sum is every client's own gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from holdfast.core.device import Precision
from holdfast.core.errors import ConfigError
from holdfast.local.losses import Batch, Loss
from holdfast.models.half_activations import rounding
from holdfast.models.keyed_draws import UnkeyedDraw
from holdfast.models.network import Network

Tensors = dict[str, Tensor]
Step = Callable[[Callable[[Tensors, Batch], Tensors], Tensors, Batch, Tensor], Tensors]
"""step(gradient, params, batch, lr) -> params: a pure function that computes a whole update of one client and
replaces the SGD step."""


def mean_loss(loss: Loss, net: nn.Module, batch: Batch, full: bool) -> Tensor:
    """Return the mean loss over the real samples of the batch; `full` says that all samples are real."""
    values = loss(net, batch).to(batch.mask.dtype)
    if values.shape != batch.mask.shape:
        raise ConfigError(
            f"loss must return one value per sample (shape {tuple(batch.mask.shape)}), got"
            f" {tuple(values.shape)}: use reduction='none'"
        )
    return values.mean() if full else (values * batch.mask).sum() / batch.mask.sum().clamp(min=1)


def _gradients(value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return the gradients of a value, with zeros for tensors that it does not depend on."""
    if not leaves or not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    grads = torch.autograd.grad(value, leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)
    ]


class LossModule(nn.Module):
    """The loss as a module, so that `functional_call` replaces the tensors everywhere and the loss may call
    any submodule."""

    def __init__(self, net: nn.Module, loss: Loss):
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, batch: Batch, full: bool = False) -> Tensor:
        return mean_loss(self.loss, self.net, batch, full)


class Single:
    """Gradients for plan `loop`: one client at a time, with its tensors bound into the module."""

    def __init__(self, network: Network, loss: Loss, precision: Precision = "fp32"):
        self.network, self.loss, self.precision = network, loss, precision
        self.module = network.module.train()
        self.params = dict(self.module.named_parameters())
        modules = dict(self.module.named_modules())
        self.keyed = [modules[name] for name in network.keyed]
        self.homes = {
            s.name: (modules[s.name.rpartition(".")[0]], s.name.rpartition(".")[2])
            for s in network.layout.slots
            if s.buffer
        }

    def bind(self, params: Tensors, buffers: Tensors) -> None:
        """Make the module use this client's tensors, so that updating one updates the other."""
        for name, tensor in params.items():
            self.params[name].data = tensor
        for name, tensor in buffers.items():
            module, field = self.homes[name]
            module._buffers[field] = tensor

    def gradients(self, wanted: list[str], batch: Batch, key: Tensor | None) -> tuple[list[Tensor], Tensor]:
        """Return the gradients of the wanted parameters and the loss. PyTorch changes buffers in place."""
        for module in self.keyed:
            module.dropout_key = key
        with self.network.computing(batch.mask.device, self.precision), self.network.drawing(key):
            if rounding():
                own = {f"net.{name}": p for name, p in self.network.computed_with(self.params).items()}
                value = functional_call(LossModule(self.module, self.loss), own, (batch, True))
            else:
                value = mean_loss(self.loss, self.module, batch, full=True)
        return _gradients(value, [self.params[name] for name in wanted]), value.detach()


class Stacked:
    """Gradients for plan `vmap`: all rows of a chunk at once."""

    def __init__(self, network: Network, loss: Loss, precision: Precision = "fp32"):
        self.network, self.precision = network, precision
        self.wrapped = LossModule(network.module.train(), loss)
        self.padded, self.full = vmap(partial(self._one, full=False)), vmap(partial(self._one, full=True))

    def _one(
        self, params: Tensors, buffers: Tensors, batch: Batch, key: Tensor, full: bool
    ) -> tuple[Tensor, Tensors]:
        """Return the loss and the new buffers of one client."""
        fresh = {name: tensor.clone() for name, tensor in buffers.items()}
        tensors = {f"net.{name}": t for name, t in (self.network.computed_with(params) | fresh).items()}
        tensors |= self.network.context(None if full else batch.mask, key, "net.")
        with self.network.drawing(key):
            return functional_call(self.wrapped, tensors, (batch, full)), fresh

    def gradients(
        self,
        wanted: list[str],
        params: Tensors,
        buffers: Tensors,
        batch: Batch,
        key: Tensor,
        full: bool = False,
        alone: bool = False,
    ) -> tuple[list[Tensor], Tensor]:
        """Return the gradients [m, ...] of the wanted parameters, and the losses [m]; `buffers` is updated in
        place. `full` says that no batch is padded, `alone` that the tensors belong to one client and have no
        leading axis."""
        leaves = {name: params[name].detach().requires_grad_() for name in wanted}
        with self.network.computing(key.device, self.precision):
            step = partial(self._one, full=full) if alone else self.full if full else self.padded
            losses, fresh = self.run(step, params | leaves, buffers, batch, key)
        grads = _gradients(losses.sum(), list(leaves.values()))
        for name, tensor in buffers.items():
            tensor.copy_(fresh[name].detach())
        return grads, losses.detach()

    @staticmethod
    def run(function: Callable[..., Any], *inputs: Any) -> Any:
        try:
            return function(*inputs)
        except RuntimeError as error:
            if "randomness" in str(error) or "aten::rrelu" in str(error):
                raise UnkeyedDraw from None
            raise


def apply_step(
    network: Network, loss: Loss, step: Step, precision: Precision = "fp32"
) -> Callable[..., tuple[Tensors, Tensors, Tensor]]:
    """Return a user's step as a pure function of one client's tensors: (params, buffers, batch, key, lr) ->
    (params, buffers, loss)."""
    wrapped = LossModule(network.module.train(), loss)

    def run(
        params: Tensors, buffers: Tensors, batch: Batch, key: Tensor, lr: Tensor
    ) -> tuple[Tensors, Tensors, Tensor]:
        draws = network.drawing(key)  # one for the whole step: each gradient in it draws new numbers
        seen: dict[str, Any] = {"buffers": buffers, "loss": torch.zeros((), dtype=lr.dtype, device=lr.device)}

        def value(p: Tensors, b: Batch) -> tuple[Tensor, tuple[Tensors, Tensor]]:
            fresh = {name: tensor.clone() for name, tensor in seen["buffers"].items()}
            with network.computing(key.device, precision), draws:
                tensors = {f"net.{name}": t for name, t in (network.computed_with(p) | fresh).items()}
                tensors |= network.context(b.mask, key, "net.")
                out = functional_call(wrapped, tensors, (b,))
            return out, (fresh, out.detach())

        def gradient(p: Tensors, b: Batch) -> Tensors:
            grads, (seen["buffers"], seen["loss"]) = grad(value, has_aux=True)(p, b)
            return grads

        params = step(gradient, params, batch, lr)
        return params, seen["buffers"], seen["loss"]

    return run


def no_luck(device: torch.device) -> Callable[[], None]:
    """Return a check to call after the work: if PyTorch's own random state has changed, it puts the state
    back and raises an error. A keyed training does not change that state."""
    cuda = device.type == "cuda"

    def state() -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if cuda else [])]

    before = state()

    def check() -> None:
        if not all(map(torch.equal, before, state())):
            torch.set_rng_state(before[0])
            if cuda:
                torch.cuda.set_rng_state(before[1], device)
            raise UnkeyedDraw

    return check
