"""Client and server halves played by hand: a client half gets its world, a server half its replies, and
nothing else is there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from holdfast.aggregators.mean import Mean
from holdfast.core.flat import Wire
from holdfast.core.keys import Key
from holdfast.core.together import computed_alone
from holdfast.core.types import Exchange, State, Uplink, Verdict
from holdfast.data.federation import Padded, Samples
from holdfast.local.client import Local, Received
from holdfast.local.fit import Recipe
from holdfast.local.plan import Plan
from holdfast.methods.base import ClientRule, Method
from holdfast.methods.context import Context
from holdfast.models.network import Network
from tests.helpers import client_keys, deal


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Tensor, expected: Any) -> None:
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def local_of(
    network: Network,
    rule: ClientRule,
    samples: Samples,
    counts: list[int],
    plan: Plan,
    ids: list[int],
    recipe: Recipe | None = None,
    initial: Tensor | None = None,
    data: Padded | None = None,
    **settings: float,
) -> Local:
    """The world of some clients: consecutive samples of the store are theirs."""
    n = len(ids)
    return Local(
        network=network,
        wire=Wire.of(network.layout, rule.shared(network, 1)),
        ids=torch.tensor(ids),
        key=client_keys(n),
        samples=samples,
        data=data or deal(samples, counts),
        validation=deal(samples, [0] * n),
        plan=plan,
        initial=torch.zeros(n, network.layout.size, dtype=network.dtype) if initial is None else initial,
        recipe=recipe or Recipe(lr=0.1, epochs=1, batch_size=16),
        selected=torch.ones(n, dtype=torch.bool),
        settings=SimpleNamespace(
            **{k: torch.full((n,), v, dtype=torch.float64) for k, v in settings.items()}
        ),
    )


def sent_to(local: Local, bank: Tensor | None, pick: list[int] | None = None) -> Received:
    """What these clients were sent: one model for all, a row each by `pick`, or nothing."""
    if bank is None:
        return Received(
            torch.zeros(0, 0, dtype=torch.float64), torch.zeros(local.n, 0, dtype=torch.int64), local.wire
        )
    rows = bank if bank.ndim == 2 else bank[None]
    return Received(rows, torch.tensor(pick or [0] * local.n)[:, None], local.wire)


def context_of(
    network: Network, rule: ClientRule, initial: Tensor, cohort: list[int], **changes: Any
) -> Context:
    ids, wire = torch.tensor(cohort, dtype=torch.int64), Wire.of(network.layout, rule.shared(network, 1))
    given: dict[str, Any] = {
        "round": 1,
        "cohort": ids,
        "available": torch.arange(10),
        "key": Key(0),
        "wire": wire,
        "layout": network.layout,
        "initial": wire.pack(initial),
        "aggregator": Mean(),
    }
    return Context(**given | changes)


def one_round(
    method: Method, state: State, ctx: Context, *replies: Uplink
) -> tuple[list[Exchange], State, Verdict]:
    """What the server half asked, and what it made of the replies."""
    steps = computed_alone(method.Server(method).round(state, ctx))
    asked = [next(steps)]
    try:
        for up in replies:
            asked.append(steps.send(up))
    except StopIteration as end:
        return asked, *end.value
    raise AssertionError(f"asked for more than {len(replies)} replies")


def delivered(method: Method, state: State, ctx: Context, ids: list[int]) -> Exchange:
    steps = computed_alone(method.Server(method).deliver(state, ctx, torch.tensor(ids)))
    try:
        next(steps)
    except StopIteration as end:
        return end.value
    raise AssertionError("asked something before it delivered")
