"""What several test files share: tiny data, slow references, and ways to play an experiment."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import Tensor, nn

from holdfast.core.keys import Key
from holdfast.core.registry import parts
from holdfast.data.federation import Padded, Samples
from holdfast.experiment.config import Config, make_config
from holdfast.local.batch_order import schedule
from holdfast.local.fit import Fitted, Recipe, fit
from holdfast.local.plan import Plan
from holdfast.models.network import Network
from holdfast.results.run import Run
from holdfast.sweeps.session import start

LOOP, VMAP = Plan("loop"), Plan("vmap")
PLANS = {
    "loop": LOOP,
    "vmap": VMAP,
    "captured-loop": Plan("captured-loop"),
    "compiled-loop": Plan("compiled-loop"),
    "compiled-vmap": Plan("compiled-vmap"),
    "sizes": Plan("compiled-vmap", sizes=(2, 4, 9)),
}
_counter = itertools.count()
RAGGED: dict[str, Any] = {"name": "dirichlet", "beta": 0.5, "min_samples": 4, "samples_per_client": 24}

TINY: dict[str, Any] = {
    "data": {"clients": 5, "partition": RAGGED},
    "model": {"name": "mlp", "hidden": 6},
    "method": {"name": "fedavg"},
    "train": {"rounds": 2, "local_epochs": 1, "batch_size": 5, "lr": 0.1, "dtype": "float64"},
    "engine": {"plan": "vmap", "threads": 1},
}
"""A run of a tenth of a second."""
NORMALISED: dict[str, Any] = {"name": "mlp", "hidden": 6, "batch_norm": True}
MODELS = {"fedbn": NORMALISED}
"""For methods that can do nothing with TINY's model."""


def tiny(**sections: Any) -> Config:
    """TINY with changes: tables are merged one level deep, anything else replaces."""
    table: dict[str, Any] = dict(TINY)
    method = sections.get("method")
    table["model"] = MODELS.get(
        method["name"] if isinstance(method, Mapping) else str(method), table["model"]
    )
    for name, value in sections.items():
        both = isinstance(value, Mapping) and isinstance(table.get(name), Mapping) and name != "model"
        table[name] = {**table[name], **value} if both else value
    return make_config(table)


def run_all(tables: Sequence[Mapping[str, Any]], out: Path) -> list[Run]:
    """Play experiments together; one Run each."""
    configs = [tiny(**table) for table in tables]
    results = start(
        [(f"cell{i}" if len(configs) > 1 else "", config) for i, config in enumerate(configs)], out
    )
    return [Run(result["run_dir"], config) for result, config in zip(results, configs, strict=True)]


def everything(run: Run) -> dict[str, Tensor]:
    """All numbers a run ended with: server state, private rows, per-client figures and the last verdict."""
    head = run.store.head()
    assert head is not None
    out = {
        name: value for name, value in head[1].items() if name.startswith(("server/", "roster/", "attack/"))
    }
    rows = run._experiment.run_context.rows.__class__(run.path / "rows", head[1]["rows/index"])
    ids = torch.tensor(sorted(rows.place), dtype=torch.int64)
    out["rows/ids"] = ids
    if len(ids):
        out |= {f"rows/{name}": value for name, value in rows.read(ids).items()}
    for round in range(1, head[0] + 1):
        out |= {f"{round}/{name}": value for name, value in run.store.arrays(round).items()}
    return out


def assert_same(a: Mapping[str, Tensor], b: Mapping[str, Tensor], tolerance: float = 1e-10) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], rtol=0, atol=tolerance, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


# ---- data and training by hand


def samples_of(x: Tensor, y: Tensor, classes: int | None = None) -> Samples:
    """A store of float samples as they are: nothing is normalised."""
    return Samples(x.float(), y, int(y.max()) + 1 if classes is None else classes, len(y))


def random_samples(rows: int, shape: tuple[int, ...] = (3,), classes: int = 3, seed: int = 0) -> Samples:
    key = Key(seed).fold("samples")
    return samples_of(
        key.fold("x").normal(rows, *shape), key.fold("y").hash(rows).remainder(classes), classes
    )


def deal(samples: Samples, counts: Sequence[int]) -> Padded:
    """Consecutive rows: the first `counts[0]` to client 0, and so on; what stands in the padding must not
    matter, so it is row 0."""
    width, start = max(1, *counts), 0
    rows = torch.zeros(len(counts), width, dtype=torch.int64)
    for i, count in enumerate(counts):
        rows[i, :count] = torch.arange(start, start + count)
        start += count
    real = torch.arange(width) < torch.tensor(counts)[:, None]
    return Padded(rows, torch.where(real, samples.y[rows], 0), torch.tensor(counts))


def client_keys(n: int, seed: int = 0) -> Key:
    return Key(seed).fold("client").fold(torch.arange(n))


def network_of(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> Network:
    return Network(
        make, head=None, signature=f"test {next(_counter)}", dtype=dtype
    )  # compiled programs are found by signature


def starts(network: Network, rows: int, seed: int = 0) -> Tensor:
    """A different start model for every row; buffers as a fresh module has them."""
    return torch.stack([network.initial(Key(seed).fold(i)) for i in range(rows)])


def slow_fit(
    network: Network,
    model: Tensor,
    samples: Samples,
    data: Padded,
    key: Key,
    recipe: Recipe,
    *,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
    after: Callable[[nn.Module, int], None] | None = None,
    optimiser_of: Callable[[nn.Module, int], torch.optim.Optimizer] | None = None,
    before: Callable[[nn.Module, torch.optim.Optimizer, int, int], None] | None = None,
) -> Tensor:
    """The reference: plain nn.Module and torch.optim.SGD, or another optimiser for each row, client after
    client, on the batches that the schedule names. `before` is called before step t of a row."""
    loss = loss or (lambda net, x, y: nn.functional.cross_entropy(net(x), y))
    n = len(data.count)

    def number(value: Any, i: int) -> float:
        return float(value[i]) if isinstance(value, Tensor) else float(value)

    order = schedule(
        key,
        data.count.numpy(),
        recipe.batch_size,
        np.array([number(recipe.epochs, i) for i in range(n)], dtype=np.int64),
        (
            None
            if recipe.steps is None
            else np.array([number(recipe.steps, i) for i in range(n)], dtype=np.int64)
        ),
        recipe.shuffle,
        recipe.drop_last,
    )
    out = []
    for row, vector in enumerate(model):
        i = row % n
        net = network.load(vector, dtype=torch.float64).double().train()
        optimiser: torch.optim.Optimizer
        if optimiser_of is not None:
            optimiser = optimiser_of(net, row)
        else:
            optimiser = torch.optim.SGD(
                net.parameters(),
                lr=number(recipe.lr, row % len(recipe.lr) if isinstance(recipe.lr, Tensor) else i),
                momentum=number(recipe.momentum, i),
                weight_decay=number(recipe.weight_decay, i),
            )
        for t in range(int(order.steps[i])):
            position = order.index[t, i][order.index[t, i] >= 0]
            x, y = samples.batch(data.rows[i, position], dtype=torch.float64), data.labels[i, position]
            optimiser.zero_grad()
            loss(net, x, y).backward()
            if before is not None:
                before(net, optimiser, row, t)
            optimiser.step()
            if after is not None:
                after(net, row)
        named = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        out.append(network.layout.flatten({k: v.detach() for k, v in named.items()}, torch.float64))
    return torch.stack(out)


def train(
    network: Network,
    model: Tensor,
    samples: Samples,
    data: Padded,
    recipe: Recipe,
    plan: Plan,
    seed: int = 0,
    **options: Any,
) -> Fitted:
    return fit(network, model, samples, data, client_keys(len(data.count), seed), recipe, plan, **options)


OFTEN = ("fedavg", "ditto", "fedcap", "fedas", "c-pfl", "fedcom")


def methods_in_turn(often: Sequence[str] = OFTEN) -> list[Any]:
    """All methods, for checks that take seconds each: the five systems and what they build on in every run of
    the tests, or fewer where a check takes long, the others with the slow ones."""
    return [
        name if name in often else pytest.param(name, marks=pytest.mark.slow) for name in built_in("method")
    ]


def some_now(cases: Iterable[Any], every: int = 2) -> list[Any]:
    """Cases for checks that run over all parts, of which there are hundreds: each so many-th of them in every
    run of the tests, the others with the slow ones."""
    out = []
    for place, case in enumerate(cases):
        if not isinstance(case, ParameterSet):
            case = pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
        out.append(case if place % every == 0 else case._replace(marks=[*case.marks, pytest.mark.slow]))
    return out


def built_in(kind: str) -> dict[str, Any]:
    """The parts of Holdfast itself, whatever other test files have registered by now."""
    return {name: part for name, part in parts(kind).items() if part.__module__.startswith("holdfast.")}
