"""Losses are written for ONE client and one batch in plain PyTorch. They return one value per sample, and
`fit` averages these over the real samples.

    def my_loss(net, batch):                     # net: your nn.Module, holding this client's parameters
        return F.cross_entropy(net(batch.x), batch.y, reduction="none") + 0.01 * net.head.weight.norm()

A term for the whole batch is simply added: the mean of (value + term) is the mean plus the term."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.core.registry import Part, register, setting


class Batch(NamedTuple):
    """One client's mini-batch. `mask` is 1 for real samples, 0 for padding; `aux` holds this client's own
    tensors."""

    x: Tensor
    y: Tensor
    mask: Tensor
    aux: dict[str, Tensor]


Loss = Callable[[Any, Batch], Tensor]


@register("loss", "cross-entropy")
class CrossEntropy(Part):
    """The usual loss of classification, with optional label smoothing."""

    label_smoothing: float = setting(0.0, "share of the target spread over all classes", ge=0, lt=1)

    def __call__(self, net: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(net(batch.x), batch.y, reduction="none", label_smoothing=self.label_smoothing)


cross_entropy = CrossEntropy()
