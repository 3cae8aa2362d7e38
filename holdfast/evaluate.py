"""How good a model is on a client's data: counts of right answers and the sum of losses, per client, for any of its models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from holdfast.data.federation import Padded, Samples
from holdfast.local.plan import Plan
from holdfast.local.steps import Single
from holdfast.models.network import Network

Predict = Callable[[nn.Module, Tensor, Mapping[str, Tensor]], Tensor]
_VALUES_AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 26}  # of the samples of one forward pass: more of them spill a core's cache
_SAMPLES_AT_ONCE = {"cpu": 1 << 12, "cuda": 1 << 14}


@dataclass(frozen=True)
class Score:
    """Per client: right answers, summed loss, and how many samples there were."""

    correct: Tensor
    loss: Tensor
    total: Tensor


def score(
    network: Network, predict: Predict, bank: Tensor, which: Tensor, samples: Samples, data: Padded, plan: Plan,
    aux: Mapping[str, Tensor] | None = None,
) -> Score:  # fmt: skip
    """Client i's data through model bank[which[i]]. Clients that share a model go through it together, except on plan `loop`,
    where every client is measured exactly as it would measure itself."""
    training = network.module.training
    network.module.eval()
    try:
        with torch.no_grad():
            return _score(network, predict, bank, which, samples, data, plan, aux or {})
    finally:
        network.module.train(training)


def _score(
    network: Network, predict: Predict, bank: Tensor, which: Tensor, samples: Samples, data: Padded, plan: Plan, aux: Mapping[str, Tensor]
) -> Score:
    n = len(data.count)
    where = data.rows.device
    device = where.type
    at_once = max(1, min(_SAMPLES_AT_ONCE[device], _VALUES_AT_ONCE[device] // max(1, math.prod(samples.sample_shape))))
    # on a CPU, clients who fill much of a pass by themselves gain nothing from being stacked
    large = device == "cpu" and n > 0 and float(data.count.double().mean()) * 8 > at_once
    few = not aux and bank.shape[0] * 4 <= n
    stacked = plan.stacked and not few and not large

    def work() -> Score:
        correct, loss = torch.zeros(n, dtype=torch.int64, device=where), torch.zeros(n, dtype=torch.float64, device=where)
        if stacked:
            _stacked(network, predict, bank, which, samples, data, aux, at_once, plan.rows, correct, loss)
        elif plan.stacked and few:
            _by_model(network, predict, bank, which, samples, data, at_once, correct, loss)
        else:
            _one_by_one(network, predict, bank, which, samples, data, aux, at_once, correct, loss)
        return Score(correct.cpu(), loss.cpu(), data.count.cpu().clone())

    return network.attempt(work, stacked)


def judge(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Right or wrong, and the loss, per sample. A model that answers with NaN is wrong, whatever argmax makes of it."""
    right = (logits.argmax(-1) == labels) & torch.isfinite(logits).all(-1)
    losses = F.cross_entropy(logits.flatten(0, -2).double(), labels.flatten(), reduction="none").view(labels.shape)
    return right, losses


def _binder(network: Network) -> Callable[[Tensor], nn.Module]:
    single = Single(network, lambda net, batch: batch.x)
    network.module.eval()
    slots = network.layout.slots

    def bind(vector: Tensor) -> nn.Module:
        views = network.layout.tensors(vector)
        single.bind({s.name: views[s.name] for s in slots if not s.buffer}, {s.name: views[s.name] for s in slots if s.buffer})
        return single.module

    return bind


def _one_by_one(
    network: Network, predict: Predict, bank: Tensor, which: Tensor, samples: Samples, data: Padded, aux: Mapping[str, Tensor],
    at_once: int, correct: Tensor, loss: Tensor,
) -> None:  # fmt: skip
    bind = _binder(network)
    for i, count in enumerate(data.count.tolist()):
        module, own = bind(bank[which[i]]), {name: value[i] for name, value in aux.items()}
        for start in range(0, count, at_once):
            part = slice(start, min(count, start + at_once))
            x = network.ordered(samples.batch(data.rows[i, part], dtype=network.dtype))
            right, losses = judge(predict(module, x, own), data.labels[i, part])
            correct[i] += right.sum()
            loss[i] += losses.sum()


def _by_model(
    network: Network, predict: Predict, bank: Tensor, which: Tensor, samples: Samples, data: Padded, at_once: int,
    correct: Tensor, loss: Tensor,
) -> None:  # fmt: skip
    """Few models for many clients: all samples of a model's clients in long batches."""
    bind = _binder(network)
    real, owner = data.mask, torch.arange(len(data.count), device=data.rows.device)[:, None].expand_as(data.rows)
    for j in range(bank.shape[0]):
        chosen = real & (which.to(real.device) == j)[:, None]
        rows, labels, clients = data.rows[chosen], data.labels[chosen], owner[chosen]
        module = bind(bank[j])
        for start in range(0, len(rows), at_once):
            part = slice(start, start + at_once)
            x = network.ordered(samples.batch(rows[part], dtype=network.dtype))
            right, losses = judge(predict(module, x, {}), labels[part])
            correct.index_add_(0, clients[part], right.long())
            loss.index_add_(0, clients[part], losses.double())


class _Predictor(nn.Module):
    def __init__(self, net: nn.Module, predict: Predict):
        super().__init__()
        self.net, self.predict = net, predict

    def forward(self, x: Tensor, aux: Mapping[str, Tensor]) -> Tensor:
        return self.predict(self.net, x, aux)


def _stacked(
    network: Network, predict: Predict, bank: Tensor, which: Tensor, samples: Samples, data: Padded, aux: Mapping[str, Tensor],
    at_once: int, most: int, correct: Tensor, loss: Tensor,
) -> None:  # fmt: skip
    """Every client under its own model, several clients in one pass."""
    wrapped = _Predictor(network.module, predict)
    forward = vmap(lambda tensors, x, own: functional_call(wrapped, tensors, (x, own)))
    width = max(1, min(128, int(data.count.max()) if len(data.count) else 0))
    rows_at_once = max(1, min(most, 256, at_once // width))
    for start in range(0, len(data.count), rows_at_once):
        rows = slice(start, start + rows_at_once)
        views = network.layout.tensors(bank[which[rows].to(bank.device)])
        tensors = {f"net.{name}": view for name, view in views.items()}
        own = {name: value[rows] for name, value in aux.items()}
        longest = int(data.count[rows].max()) if len(data.count[rows]) else 0
        for first in range(0, longest, width):
            part = slice(first, min(first + width, longest))
            logits = forward(tensors, samples.batch(data.rows[rows, part], dtype=network.dtype), own)
            right, losses = judge(logits, data.labels[rows, part])
            real = data.mask[rows, part]
            correct[rows] += (right & real).sum(1)
            loss[rows] += torch.where(real, losses, torch.zeros_like(losses)).sum(1)
