"""The Fisher information of each client's model on its own training data: squared gradients of the
log-likelihood of the labels it has.

There are several definitions of what is squared, and they differ by much more than a factor:

    batch-sum     sum over the batches b of |grad of the mean of b|^2    grows with the number of batches:
                  hides a weighting by size
    batch-mean    the mean over the batches instead
    per-sample    mean over the samples of |grad of the sample|^2        the usual (empirical) Fisher
                  information; a step for each sample
    full          |grad of the sum over all samples|^2                   of the data's log-likelihood; grows
                  with the square of their number
    full-mean     |grad of the mean of all samples|^2                    the same over that square; both go to
                  0 where a model is fitted

Batches are taken in the order of the data, the module is in evaluation mode, and no parameter is trained."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from holdfast.core.device import Precision, to_device
from holdfast.core.keys import Key
from holdfast.data.federation import Padded, Samples
from holdfast.local.batch_order import schedule
from holdfast.local.gradients import Single, Stacked
from holdfast.local.losses import Loss, cross_entropy
from holdfast.local.plan import Plan
from holdfast.local.stack import Recipe, Stack
from holdfast.models.network import Network

Definition = Literal["batch-sum", "batch-mean", "per-sample", "full", "full-mean"]
_WHOLE = ("full", "full-mean")


def trace(
    network: Network,
    model: Tensor,
    samples: Samples,
    data: Padded,
    recipe: Recipe,
    plan: Plan,
    of: Definition = "batch-sum",
    loss: Loss = cross_entropy,
) -> Tensor:
    """Return [n]: the trace of client i's Fisher information under model[i]; 0 if it has no batch."""
    return _information(network, model, samples, data, recipe, plan, of, loss, each=False)


def diagonal(
    network: Network,
    model: Tensor,
    samples: Samples,
    data: Padded,
    recipe: Recipe,
    plan: Plan,
    of: Definition = "batch-sum",
    loss: Loss = cross_entropy,
) -> Tensor:
    """Return [n, size]: the same for each single parameter; 0 for buffers and for frozen parameters."""
    return _information(network, model, samples, data, recipe, plan, of, loss, each=True)


def _information(
    network: Network,
    model: Tensor,
    samples: Samples,
    data: Padded,
    recipe: Recipe,
    plan: Plan,
    of: Definition,
    loss: Loss,
    each: bool,
) -> Tensor:
    n, kept = len(data.count), network.layout.trainable
    batch = 1 if of == "per-sample" else recipe.batch_size
    drop = recipe.drop_last and of in ("batch-sum", "batch-mean")
    # no random number is drawn: there is no shuffling, and no Dropout in evaluation mode
    key = Key(torch.zeros(n, dtype=torch.int64))
    order = schedule(
        key, data.count.cpu().numpy(), batch, np.ones(n, dtype=np.int64), shuffle=False, drop_last=drop
    )
    plain = Recipe(batch_size=batch, shuffle=False, drop_last=drop, loss=loss)
    stack = Stack.of(network, model, samples, data, key, plain, order, None, None, {}, None)
    out = torch.zeros(n, int(kept.sum()) if each else 1, dtype=network.dtype, device=model.device)
    # as in `fit`, the rows that still have batches are always the first ones
    ranking = np.argsort(-order.steps, kind="stable")
    training = network.module.training
    try:
        for part in np.array_split(ranking, -(-n // plan.together)) if n else []:
            rows = torch.from_numpy(part)
            out[to_device(rows, out.device)] = network.attempt(
                partial(_added_up, stack, rows, plan, of, each), plan.stacked
            )
    finally:
        network.module.train(training)
    if not each:
        return out[:, 0]
    spread = torch.zeros(n, network.layout.size, dtype=out.dtype, device=out.device)
    spread[:, to_device(kept, out.device)] = out
    return spread


def _added_up(stack: Stack, rows: Tensor, plan: Plan, of: Definition, each: bool) -> Tensor:
    """Return [m, parameters], or [m, 1] where only their sum is wanted."""
    owner = stack.owner(rows)
    batches, count = (
        torch.from_numpy(stack.order.steps)[owner].double(),
        stack.data.count.cpu()[owner].double(),
    )
    width, device, dtype = int(stack.network.layout.trainable.sum()), stack.model.device, stack.network.dtype
    whole = of in _WHOLE
    total = torch.zeros(len(rows), width if each or whole else 1, dtype=dtype, device=device)
    for t, now, grads in (_together if plan.stacked else _one_by_one)(stack, rows, plan.precision):
        sizes = torch.from_numpy(stack.order.size[t])[owner[now]].double()
        share = {"batch-sum": torch.ones_like(sizes), "full": sizes, "full-mean": sizes / count[now]}.get(
            of, 1 / batches[now]
        )
        share = to_device(share.to(dtype), device)[:, None]
        total[now] += share * (grads if whole else _squares(grads, each))
    return _squares(total, each) if whole else total


def _squares(grads: Tensor, each: bool) -> Tensor:
    return grads.square() if each else grads.square().sum(1, keepdim=True)


def _together(stack: Stack, rows: Tensor, precision: Precision) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield for each batch t the gradients [m, parameters] of the first m rows, computed together; the rows
    after these have no further batch."""
    network, (params, buffers), wanted = stack.network, stack.tensors(rows), stack.trained()[0]
    stepper = Stacked(network, stack.recipe.loss, precision)
    network.module.eval()
    steps = stack.order.steps[stack.owner(rows).numpy()]
    counts = [int((steps > t).sum()) for t in range(int(steps.max(initial=0)))]
    key = torch.zeros(len(rows), dtype=torch.int64, device=stack.model.device)
    for t, batch in enumerate(stack.padded(rows, counts)):
        now = slice(0, counts[t])
        own, state = {k: v[now] for k, v in params.items()}, {k: v[now] for k, v in buffers.items()}
        grads, _ = stepper.gradients(wanted, own, state, batch, key[now])
        yield t, now, torch.cat([grad.flatten(1) for grad in grads], 1)


def _one_by_one(stack: Stack, rows: Tensor, precision: Precision) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield the same, one row after the other, each on exactly the samples it has."""
    network, (params, buffers), wanted = stack.network, stack.tensors(rows), stack.trained()[0]
    stepper = Single(network, stack.recipe.loss, precision)
    network.module.eval()
    no_key = torch.zeros((), dtype=torch.int64, device=stack.model.device)
    for i, row in enumerate(rows.tolist()):
        stepper.bind({k: v[i] for k, v in params.items()}, {k: v[i] for k, v in buffers.items()})
        for t, batch in enumerate(stack.batches(row, row)):
            grads, _ = stepper.gradients(wanted, batch, no_key)
            yield t, slice(i, i + 1), torch.cat([grad.flatten() for grad in grads])[None]
