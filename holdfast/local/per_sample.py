"""DP-SGD: the gradient of every sample is clipped, the clipped ones are summed, noise is added to the sum,
and the result is divided by the number of samples (Abadi et al., Deep Learning with Differential Privacy,
CCS 2016).

What a row needs for that (its clip, the deviation of its noise, its key) travels with its batches, in `aux`:
so every plan has it, and experiments with different settings train as one stack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from holdfast.core.device import Precision, to_device
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key, combine
from holdfast.local.gradients import LossModule, Single, Stacked, Tensors
from holdfast.local.losses import Batch, Loss
from holdfast.local.per_client import plain
from holdfast.models.network import Network

if TYPE_CHECKING:
    from holdfast.local.stack import Recipe

CLIP, NOISE, LUCK = "privacy/clip", "privacy/noise", "privacy/luck"


def with_privacy(
    aux: Mapping[str, Tensor] | None, recipe: Recipe, key: Key, model: Tensor, own_step: bool
) -> dict[str, Tensor]:
    """What a training is given beside its batches, with what DP-SGD needs, one row for each model: the models
    of a client have noise of their own."""
    out = dict(aux or {})
    if recipe.sample_clip is None:
        return out
    if own_step:
        raise ConfigError(
            'privacy.level = "sample": this method takes steps of its own, so the gradients of single samples'
            " cannot be clipped; choose another method"
        )
    rows, clients = len(model), len(key)
    noise = _rows(recipe.sample_noise, model)
    out[CLIP] = _rows(recipe.sample_clip, model)
    if bool((noise != 0).any()):
        luck = key.to("cpu").fold("sample-noise").bits
        if recipe.noise_key is not None:  # which the server does not know
            luck = combine(plain(recipe.noise_key), luck)
        copy = torch.arange(rows) // clients
        out |= {NOISE: noise, LUCK: to_device(combine(luck.repeat(rows // clients), copy), model.device)}
    return out


def _rows(value: float | Tensor, model: Tensor) -> Tensor:
    """A number for each model, from one for all or one for each client."""
    values = plain(value) if isinstance(value, Tensor) else torch.tensor([value], dtype=torch.float64)
    values = values.reshape(-1)
    return to_device(values.repeat(len(model) // len(values)).to(model.dtype), model.device)


def stacked_gradients(
    network: Network, loss: Loss, precision: Precision, recipe: Recipe
) -> Stacked | PerSample:
    """Gradients for stacks, by the recipe."""
    if recipe.sample_clip is None:
        return Stacked(network, loss, precision)
    return PerSample(network, loss, precision)


def single_gradients(
    network: Network, loss: Loss, precision: Precision, recipe: Recipe
) -> Single | PerSampleOfOne:
    """Gradients for one client at a time, by the recipe."""
    if recipe.sample_clip is None:
        return Single(network, loss, precision)
    return PerSampleOfOne(PerSample(network, loss, precision))


class PerSample:
    """Clipped and noised gradients, in place of those of `Stacked`. Buffers do not change: a layer that keeps
    statistics of batches is refused."""

    def __init__(self, network: Network, loss: Loss, precision: Precision = "fp32"):
        self.network, self.precision = network, precision
        self.wrapped = LossModule(network.module.train(), loss)

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
        """Return the gradients [m, ...] of the wanted parameters, and the losses [m]; `alone` says that the
        tensors belong to one client and have no leading axis."""

        def one(params: Tensors, buffers: Tensors, batch: Batch, key: Tensor) -> tuple[list[Tensor], Tensor]:
            return self._of_row(wanted, params, buffers, batch, key)

        given = {name: value.detach() for name, value in params.items()}
        with self.network.computing(key.device, self.precision):
            return Stacked.run(one if alone else vmap(one), given, buffers, batch, key)

    def _of_row(
        self, wanted: list[str], params: Tensors, buffers: Tensors, batch: Batch, key: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        size = batch.mask.shape[0]
        real = batch.mask.new_ones(1)

        def loss_of(moved: Tensors, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
            """The loss of one sample, as a batch of its own."""
            own = self.network.computed_with(params | moved)
            tensors = {f"net.{name}": value for name, value in (own | buffers).items()}
            tensors |= self.network.context(None, key, "net.")
            one = Batch(x[None], y[None], real, batch.aux)
            with self.network.drawing(key):
                return functional_call(self.wrapped, tensors, (one, True))

        keys = combine(key, torch.arange(size, device=key.device))  # each sample has its own Dropout
        each = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0, 0))
        grads, losses = each({name: params[name] for name in wanted}, batch.x, batch.y, keys)
        found = [grads[name] for name in wanted]
        squares = torch.stack([grad.reshape(size, -1).square().sum(1) for grad in found]).sum(0)
        weight = (batch.aux[CLIP] / squares.sqrt()).clamp(max=1.0) * batch.mask
        count = batch.mask.sum().clamp(min=1)
        summed = [torch.tensordot(weight, grad, dims=1) for grad in found]
        if NOISE in batch.aux:
            luck = Key(combine(batch.aux[LUCK], key))
            summed = [
                value + batch.aux[NOISE] * luck.fold(name).normal(*value.shape, dtype=value.dtype)
                for name, value in zip(wanted, summed, strict=True)
            ]
        return [value / count for value in summed], (losses * batch.mask).sum() / count


class PerSampleOfOne:
    """The same for plan `loop`, in place of `Single`."""

    def __init__(self, inner: PerSample):
        self.inner = inner

    def bind(self, params: Tensors, buffers: Tensors) -> None:
        """Take this client's tensors, which updates change in place."""
        self.params, self.buffers = params, buffers

    def gradients(self, wanted: list[str], batch: Batch, key: Tensor) -> tuple[list[Tensor], Tensor]:
        return self.inner.gradients(wanted, self.params, self.buffers, batch, key, alone=True)
