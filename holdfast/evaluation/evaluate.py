"""Measuring models on clients' data: the samples pass through the models, client by client, model by model or
stacked, and the answers are counted. Other uses of a model's answers go the same way, `through` it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from holdfast.data.federation import Padded, Samples
from holdfast.evaluation.scores import AnswerCounts, Score
from holdfast.local.gradients import Single
from holdfast.local.plan import Plan
from holdfast.models.network import Network

Predict = Callable[[nn.Module, Tensor, Mapping[str, Tensor]], Tensor]
_VALUES_AT_ONCE = {
    "cpu": 1 << 17,
    "cuda": 1 << 26,
}  # of the samples of one forward pass: more of them spill a core's cache
_SAMPLES_AT_ONCE = {"cpu": 1 << 12, "cuda": 1 << 14}
_ANSWERS_KEPT = {
    "cpu": 1 << 22,
    "cuda": 1 << 26,
}  # numbers of 8 bytes, one per place and class, where a metric needs all of a client's


class AnswerReceiver(Protocol):
    """Receives the answers to clients' samples, portion by portion: see `AnswerCounts.add`."""

    def add(self, clients: int | slice | Tensor, places: slice | Tensor, answers: Tensor, /) -> None: ...


S = TypeVar("S", bound=AnswerReceiver)


def score(
    network: Network,
    predict: Predict,
    bank: Tensor,
    which: Tensor,
    samples: Samples,
    data: Padded,
    plan: Plan,
    aux: Mapping[str, Tensor] | None = None,
    metrics: Collection[str] = (),
) -> Score:
    """Score model bank[which[i]] on client i's data. `metrics` are those beside accuracy and loss."""
    n, most = len(data.count), _ANSWERS_KEPT[data.rows.device.type]
    portions = list(_portions(data.count, samples.classes, most)) if "auc" in metrics else [slice(0, n)]
    tallies = through(
        network,
        predict,
        bank,
        which,
        samples,
        data,
        plan,
        lambda own: AnswerCounts(own, samples.classes, metrics),
        aux,
        portions,
    )
    return Score.joined([tally.score() for tally in tallies])


def through(
    network: Network,
    predict: Predict,
    bank: Tensor,
    which: Tensor,
    samples: Samples,
    data: Padded,
    plan: Plan,
    begin: Callable[[Padded], S],
    aux: Mapping[str, Tensor] | None = None,
    portions: Sequence[slice] | None = None,
) -> list[S]:
    """Pass client i's data through model bank[which[i]], in evaluation mode; what `begin` makes for each
    portion of the clients receives the answers. Clients that share a model go through it together, except on
    plan `loop`, where every client is measured exactly as it would measure itself."""
    training = network.module.training
    network.module.eval()
    try:
        with torch.no_grad(), network.drawing(None):
            return _through(
                network,
                predict,
                bank,
                which,
                samples,
                data,
                plan,
                begin,
                aux or {},
                portions or [slice(0, len(data.count))],
            )
    finally:
        network.module.train(training)


def _through(
    network: Network,
    predict: Predict,
    bank: Tensor,
    which: Tensor,
    samples: Samples,
    data: Padded,
    plan: Plan,
    begin: Callable[[Padded], S],
    aux: Mapping[str, Tensor],
    portions: Sequence[slice],
) -> list[S]:
    n = len(data.count)
    device = data.rows.device.type
    at_once = max(
        1, min(_SAMPLES_AT_ONCE[device], _VALUES_AT_ONCE[device] // max(1, math.prod(samples.sample_shape)))
    )
    # on a CPU, clients that fill much of a pass by themselves gain nothing from being stacked
    large = device == "cpu" and n > 0 and float(data.count.double().mean()) * 8 > at_once
    few = not aux and bank.shape[0] * 4 <= n
    stacked = plan.stacked and not few and not large

    def work(part: slice, at_once: int) -> S:
        longest = max(1, int(data.count[part].max()) if len(data.count[part]) else 0)
        own = Padded(data.rows[part, :longest], data.labels[part, :longest], data.count[part])
        whose, theirs, sink = which[part], {name: value[part] for name, value in aux.items()}, begin(own)
        if stacked:
            _stacked(network, predict, bank, whose, samples, own, theirs, at_once, plan.rows, sink)
        elif plan.stacked and few:
            _by_model(network, predict, bank, whose, samples, own, at_once, sink)
        else:
            _one_by_one(network, predict, bank, whose, samples, own, theirs, at_once, sink)
        return sink

    def fitting() -> list[S]:
        most = at_once
        while True:
            try:
                return [work(part, most) for part in portions]
            except (
                torch.OutOfMemoryError
            ):  # how much memory a network needs for a sample is not known from the sample
                if most < 2:
                    raise
                most //= 4
                torch.cuda.empty_cache()

    return network.attempt(fitting, stacked)


def _portions(count: Tensor, classes: int, most: int) -> Iterator[slice]:
    """Consecutive clients whose answers, in a table as wide as the longest of them needs, are within the
    bound; at least one of them."""
    start = longest = 0
    for i, samples in enumerate(count.tolist()):
        longest = max(longest, samples)
        if i > start and (i + 1 - start) * longest * classes > most:
            yield slice(start, i)
            start, longest = i, samples
    yield slice(start, len(count))


def _binder(network: Network) -> Callable[[Tensor], nn.Module]:
    single = Single(network, lambda net, batch: batch.x)
    network.module.eval()
    slots = network.layout.slots

    def bind(vector: Tensor) -> nn.Module:
        views = network.layout.tensors(
            vector.clone()
        )  # a module may write, as an embedding with max_norm does
        single.bind(
            {s.name: views[s.name] for s in slots if not s.buffer},
            {s.name: views[s.name] for s in slots if s.buffer},
        )
        return single.module

    return bind


def _one_by_one(
    network: Network,
    predict: Predict,
    bank: Tensor,
    which: Tensor,
    samples: Samples,
    data: Padded,
    aux: Mapping[str, Tensor],
    at_once: int,
    sink: AnswerReceiver,
) -> None:
    bind = _binder(network)
    for i, count in enumerate(data.count.tolist()):
        module, own = bind(bank[which[i]]), {name: value[i] for name, value in aux.items()}
        for start in range(0, count, at_once):
            part = slice(start, min(count, start + at_once))
            x = network.ordered(samples.batch(data.rows[i, part], dtype=network.dtype))
            sink.add(i, part, predict(module, x, own))


def _by_model(
    network: Network,
    predict: Predict,
    bank: Tensor,
    which: Tensor,
    samples: Samples,
    data: Padded,
    at_once: int,
    sink: AnswerReceiver,
) -> None:
    """Few models for many clients: all samples of a model's clients in long batches."""
    bind, real = _binder(network), data.mask
    for j in which.unique().tolist():
        clients, places = (real & (which.to(real.device) == j)[:, None]).nonzero(as_tuple=True)
        rows = data.rows[clients, places]
        module = bind(bank[j])
        for start in range(0, len(rows), at_once):
            part = slice(start, start + at_once)
            x = network.ordered(samples.batch(rows[part], dtype=network.dtype))
            sink.add(clients[part], places[part], predict(module, x, {}))


class _Predictor(nn.Module):
    def __init__(self, net: nn.Module, predict: Predict):
        super().__init__()
        self.net, self.predict = net, predict

    def forward(self, x: Tensor, aux: Mapping[str, Tensor]) -> Tensor:
        return self.predict(self.net, x, aux)


def _stacked(
    network: Network,
    predict: Predict,
    bank: Tensor,
    which: Tensor,
    samples: Samples,
    data: Padded,
    aux: Mapping[str, Tensor],
    at_once: int,
    most: int,
    sink: AnswerReceiver,
) -> None:
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
            sink.add(
                rows, part, forward(tensors, samples.batch(data.rows[rows, part], dtype=network.dtype), own)
            )
