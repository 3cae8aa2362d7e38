"""Prototypes: the mean features of a client's samples, class by class."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.data.federation import Padded, Samples
from holdfast.evaluation.evaluate import Predict, through
from holdfast.local.plan import Plan
from holdfast.models.features import features
from holdfast.models.network import Network


class Prototypes(NamedTuple):
    """means [n, classes, d], zeros where a client has nothing of the class; counts [n, classes]; squares [n,
    classes], the mean squared length of the features."""

    means: Tensor
    counts: Tensor
    squares: Tensor


def prototypes(
    network: Network,
    model: Tensor,
    samples: Samples,
    data: Padded,
    plan: Plan,
    head: str | None,
    classes: int | None = None,
) -> Prototypes:
    """Pass client i's samples through model[i], in evaluation mode, a portion at a time; features are summed
    and not kept. Without a head, the features are the model's answers. `classes`: as many as the model tells
    apart, if not those of the data."""
    predict: Predict = lambda net, x, aux: features(net, x, head)  # noqa: E731
    width = width_of(network, model, samples, head)
    begin = partial(_Sums, classes=classes or samples.classes, width=width, dtype=network.dtype)
    sums = through(network, predict, model, torch.arange(len(model)), samples, data, plan, begin)[0]
    count = sums.count.clamp(min=1)
    return Prototypes(sums.total / count[..., None], sums.count, sums.squares / count)


def held(data: Padded, classes: int) -> Tensor:
    """[n, classes]: how many samples of each class a client has."""
    n, device = len(data.count), data.rows.device
    at = torch.arange(n, device=device)[:, None] * classes + data.labels
    return torch.bincount(at[data.mask], minlength=n * classes).view(n, classes)


def apart(found: Tensor, means: Tensor, known: Tensor, y: Tensor) -> Tensor:
    """For losses: the mean squared distance of each sample's features to the prototype of its class, 0 where
    that is not known."""
    return known[y] * (found - means[y]).square().mean(1)


def averaged(
    means: Tensor, held: Tensor, weighting: str, old: Tensor, known: Tensor
) -> tuple[Tensor, Tensor]:
    """The prototypes of a server from those of n clients, [classes, d] and which are known: each class over
    the clients that hold it, all alike ("equal") or by their samples of it. A class that none of them holds
    keeps the prototype it had."""
    means, held = means.to(old.device), held.to(old.device)
    share = held if weighting == "samples" else (held > 0).to(means.dtype)
    total = share.sum(0)
    share = share / total.clamp(
        min=torch.finfo(total.dtype).tiny
    )  # before anything is added up: the mean of finite numbers is finite
    mean = torch.einsum("kc,kcd->cd", share, means)
    fresh = total > 0
    return torch.where(fresh[:, None], mean, old), torch.where(fresh, torch.ones_like(known), known)


def width_of(network: Network, model: Tensor, samples: Samples, head: str | None) -> int:
    """The number of features, found by passing one sample through the first model, also where no client has
    any sample."""
    if not len(model):
        return 0
    module, tensors = network.module, network.layout.tensors(model[0])
    sample = samples.batch(torch.zeros(1, dtype=torch.int64, device=model.device), network.dtype)
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            return features(module, sample, head, tensors).shape[1]
    finally:
        module.train(training)


class _Sums:
    """Features added up by client and class."""

    def __init__(self, data: Padded, classes: int, width: int, dtype: torch.dtype):
        n, device = len(data.count), data.rows.device
        self.data, self.real, self.classes = data, data.mask, classes
        self.owner = torch.arange(n, device=device)[:, None].expand_as(self.real)
        self.total = torch.zeros(n, classes, width, dtype=dtype, device=device)
        self.squares = torch.zeros(n, classes, dtype=dtype, device=device)
        self.count = held(data, classes)

    def add(self, clients: int | slice | Tensor, places: slice | Tensor, answers: Tensor) -> None:
        real = self.real[clients, places].flatten()
        at = (self.owner[clients, places] * self.classes + self.data.labels[clients, places]).flatten()
        found = answers.flatten(0, -2)
        found = torch.where(real[:, None], found, torch.zeros_like(found))
        self.total.view(-1, found.shape[1]).index_add_(0, at, found)
        self.squares.view(-1).index_add_(0, at, found.square().sum(1))
