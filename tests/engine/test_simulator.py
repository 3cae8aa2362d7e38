from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.core.keys import Key
from holdfast.core.types import ROOT, Exchange, broadcast
from holdfast.data.federation import ClientRows, Padded
from holdfast.engine import client_stack
from holdfast.engine.client_stack import ClientStack, client_key
from holdfast.engine.lockstep import RunDriver, drive
from holdfast.engine.run_context import join, take
from holdfast.engine.simulator import Call, Simulator
from holdfast.experiment.build import shared_samples
from holdfast.experiment.loop import Experiment
from holdfast.local import programs
from holdfast.local.per_client import plain
from holdfast.local.plan import Plan
from holdfast.results.run import Run
from tests.helpers import RAGGED, assert_same, everything, run_all, tiny


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(task, experiments, clients) of every stack that was worked on."""
    seen: list[tuple[str, int, int]] = []
    perform = ClientStack.perform

    def watched(self: ClientStack, parts: list[Call], *rest: Any) -> Any:
        seen.append(
            (
                parts[0].exchange.task,
                len({id(p.run_context) for p in parts}),
                sum(len(p.exchange.to) for p in parts),
            )
        )
        return perform(self, parts, *rest)

    monkeypatch.setattr(ClientStack, "perform", watched)
    return seen


def cells(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"method": {"name": "ditto"}, **change} for change in changes]


def test_experiments_that_share_a_recipe_become_one_stack(
    stacks: list[tuple[str, int, int]], simulate_all: Callable[..., list[Run]]
) -> None:
    simulate_all(
        cells(
            {},
            {"seed": 1, "train": {"lr": 0.3, "local_epochs": 3, "lr_decay": 0.5}},
            {"method": {"name": "ditto", "lam": 2.0}},
            {
                "data": {"clients": 3, "partition": {**RAGGED, "beta": 5.0}},
                "aggregator": {"name": "mean", "weights": "uniform"},
            },
        )
    )
    assert stacks == [("train", 4, 18), ("evaluate", 4, 18)] * 2


@pytest.mark.parametrize(
    "change",
    [
        {"method": "fedavg"},
        {"model": {"name": "mlp", "hidden": 7}},
        {"train": {"batch_size": 6}},
        {"train": {"shuffle": False}},
        {"train": {"drop_last": True}},
        {"train": {"local_steps": 2}},
        {"train": {"dtype": "float32"}},
        {"train": {"augment": {"crop": 1}}},
        {"train": {"loss": {"name": "cross-entropy", "label_smoothing": 0.1}}},
        {"data": {"options": {"normalise": "none"}}},
    ],
    ids=str,
)
def test_experiments_with_different_recipes_are_separate_stacks(
    change: dict[str, Any], stacks: list[tuple[str, int, int]], simulate_all: Callable[..., list[Run]]
) -> None:
    simulate_all(cells({}, change))
    assert all(experiments == 1 and clients == 5 for _, experiments, clients in stacks)


def test_experiments_of_different_length(
    simulate_all: Callable[..., list[Run]], simulate: Callable[..., Run]
) -> None:
    tables = cells(
        {"train": {"rounds": 1}},
        {"train": {"rounds": 4}, "seed": 1},
        {"train": {"rounds": 2}, "evaluate": {"every": 2}},
    )
    for table, fused in zip(tables, simulate_all(tables), strict=True):
        assert fused.round == table["train"]["rounds"]
        assert_same(everything(fused), everything(simulate(**table)), 1e-10)


def test_chunks_hold_no_more_rows_than_the_plan_says(
    stacks: list[tuple[str, int, int]], tmp_path: Path
) -> None:
    configs = [tiny(**table) for table in cells({}, {"seed": 1})]
    experiments = [
        Experiment(c, tmp_path / str(i), "", s)
        for i, (c, s) in enumerate(zip(configs, shared_samples(configs), strict=True))
    ]
    for experiment in experiments:
        experiment.store.open()
    plans = {experiments[0].run_context.plan_key: Plan("vmap", rows=4)}
    drive(Simulator(plans), [RunDriver(e.run_context, e.steps()) for e in experiments])
    trained = [clients for task, _, clients in stacks if task == "train"]
    assert trained == [2] * 10  # each client trains two models
    assert (
        "train",
        2,
        2,
    ) in stacks  # a chunk may hold the last client of one experiment and the first of the next
    for experiment, table in zip(experiments, cells({}, {"seed": 1}), strict=True):
        experiment.store.close()
        alone = run_all([table], tmp_path / f"alone{experiment.out.name}")[0]
        mine = experiment.store.head()
        assert mine is not None
        torch.testing.assert_close(mine[1]["server/model"], alone.state()["model"], rtol=0, atol=1e-10)


def test_a_clients_key_depends_on_what_it_is_for_and_on_nothing_else() -> None:
    def bits(ids: list[int], round: int = 1, step: int = 0, seed: int = 0) -> list[int]:
        exchange = Exchange(
            "train",
            torch.tensor(ids),
            torch.zeros(1, 2),
            torch.zeros(len(ids), 1, dtype=torch.int64),
            step=step,
        )
        return client_key(Key(seed), round, exchange).bits.tolist()

    assert bits([2, 5])[1] == bits([5])[0] == bits([ROOT, 5, 9])[1]
    assert (
        len({bits([5])[0], bits([5], round=2)[0], bits([5], step=1)[0], bits([5], seed=1)[0], bits([6])[0]})
        == 5
    )


def test_the_servers_own_data_comes_first() -> None:
    labels = np.arange(10)
    table, root = (
        ClientRows.from_lists([np.array([1, 2]), np.array([3]), np.array([4, 5, 6])], labels),
        ClientRows.from_lists([np.array([7, 8, 9, 0])], labels),
    )
    got = take(table, torch.tensor([ROOT, 1, 2]), root)
    assert got.count.tolist() == [4, 1, 3] and got.rows.tolist() == [[7, 8, 9, 0], [3, 0, 0, 0], [4, 5, 6, 0]]
    assert take(table, torch.tensor([ROOT, 1]), None).count.tolist() == [0, 1]
    assert take(table, torch.tensor([0, 2]), root).rows.tolist() == [[1, 2, 0], [4, 5, 6]]


def test_joined_tables_are_as_wide_as_the_widest() -> None:
    narrow = Padded(torch.tensor([[1]]), torch.tensor([[5]]), torch.tensor([1]))
    wide = Padded(torch.tensor([[2, 3, 4]]), torch.tensor([[6, 7, 8]]), torch.tensor([3]))
    got = join([narrow, wide])
    assert (
        got.rows.tolist() == [[1, 0, 0], [2, 3, 4]]
        and got.labels.tolist() == [[5, 0, 0], [6, 7, 8]]
        and got.count.tolist() == [1, 3]
    )


def test_banks_of_several_experiments_are_joined_and_picks_shifted(tmp_path: Path) -> None:
    """Picks of the second bank are shifted behind the first; a narrower pick is filled with 'none'."""
    experiment = Experiment(tiny(), tmp_path / "x")
    clients = ClientStack({experiment.run_context.plan_key: Plan("vmap")})
    d = experiment.network.layout.size
    first = broadcast("train", torch.zeros(d), torch.tensor([0, 1]))
    second = Exchange(
        "train", torch.tensor([1, 4]), torch.ones(3, d), torch.tensor([[2, 0, -1], [1, -1, -1]])
    )
    calls = [Call(experiment.run_context, first), Call(experiment.run_context, second)]
    received = clients._received(calls, clients.local(calls))
    assert received.bank.shape == (4, d)
    assert received.pick.tolist() == [[0, -1, -1], [0, -1, -1], [3, 1, -1], [2, -1, -1]]
    assert received.has.tolist() == [True] * 4 and received.model[:, 0].tolist() == [0, 0, 1, 1]


def test_numbers_become_one_per_client(tmp_path: Path) -> None:
    configs = [
        tiny(method={"name": "ditto", "lam": lam}, train={"lr": lr, "lr_decay": 0.5}, seed=s)
        for lam, lr, s in ((1.0, 0.1, 0), (2.0, 0.2, 1))
    ]
    experiments = [Experiment(c, tmp_path / str(i)) for i, c in enumerate(configs)]
    for experiment in experiments:
        experiment.run_context.round = 3
    clients = ClientStack({experiments[0].run_context.plan_key: Plan("vmap")})
    model = experiments[0].initial
    local = clients.local(
        [
            Call(e.run_context, broadcast("train", model, torch.tensor(ids)))
            for e, ids in zip(experiments, ([0, 3], [1]), strict=True)
        ]
    )
    assert local.ids.tolist() == [0, 3, 1] and local.n == 3
    assert plain(local.settings.lam).tolist() == [1, 1, 2]
    torch.testing.assert_close(
        plain(local.recipe.lr), torch.tensor([0.025, 0.025, 0.05], dtype=torch.float64)
    )
    assert torch.equal(local.initial[0], experiments[0].initial) and torch.equal(
        local.initial[2], experiments[1].initial
    )
    assert local.count.tolist() == [
        *experiments[0].federation.train.counts[[0, 3]].tolist(),
        int(experiments[1].federation.train.counts[1]),
    ]


def side_by_side(tmp_path: Path, *tables: dict[str, Any]) -> tuple[Simulator, list[Experiment]]:
    """Experiments on one sample store, as a sweep builds them, in their first round."""
    configs = [tiny(**table) for table in tables]
    stores = zip(configs, shared_samples(configs), strict=True)
    made = [Experiment(config, tmp_path / str(i), "", samples) for i, (config, samples) in enumerate(stores)]
    for experiment in made:
        experiment.run_context.round = 1
        (experiment.out / "rows").mkdir(parents=True)
    return Simulator({experiment.run_context.plan_key: Plan("vmap") for experiment in made}), made


@pytest.mark.parametrize(
    "number", [{"weight_decay": 0.5}, {"momentum": 0.9}, {"lr": 0.3}, {"local_epochs": 3}], ids=str
)
def test_a_fused_cell_trains_with_its_own_numbers(
    number: dict[str, float], stacks: list[tuple[str, int, int]], tmp_path: Path
) -> None:
    """Two cells that differ in one number, in either order: together they answer what each of them answers
    alone."""
    simulator, experiments = side_by_side(tmp_path, {}, {"train": number})
    calls = [
        Call(e.run_context, broadcast("train", experiments[0].initial, torch.tensor([0, 3])))
        for e in experiments
    ]
    alone = [simulator.exchange([call])[0]["update"] for call in calls]
    assert not torch.allclose(alone[0], alone[1], rtol=0, atol=1e-3)
    for order in ([0, 1], [1, 0]):
        together = simulator.exchange([calls[i] for i in order])
        assert stacks.pop() == ("train", 2, 4)
        for i, up in zip(order, together, strict=True):
            torch.testing.assert_close(up["update"], alone[i], rtol=0, atol=1e-10)


@pytest.mark.parametrize("real", [0, 1])
def test_exchanges_that_discard_state_are_not_fused_with_others(real: int, tmp_path: Path) -> None:
    """Two cells ask for the same task at once, one of them off the books: only the other one's clients have
    new private rows."""
    simulator, experiments = side_by_side(tmp_path, *cells({}, {"seed": 1}))
    asked = broadcast("train", experiments[0].initial, torch.tensor([0, 3]))
    simulator.exchange(
        [Call(e.run_context, replace(asked, discard_state=i != real)) for i, e in enumerate(experiments)]
    )
    assert [sorted(e.run_context.rows.staged) for e in experiments] == [
        [0, 3] if i == real else [] for i in range(2)
    ]


def test_out_of_memory_frees_programs_and_tries_again(
    simulate: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What programs hold is given back, and the same work is done again: same bits."""
    whole = everything(simulate(method="ditto"))
    tried, forgotten = [], []

    def short(*args: Any) -> Any:
        tried.append(args)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("none left")
        return honest(*args)

    honest = client_stack.perform
    monkeypatch.setattr(client_stack, "perform", short)
    monkeypatch.setattr(programs, "forget", lambda: forgotten.append(True))
    assert_same(everything(simulate(method="ditto")), whole, 0)
    assert forgotten and all(a is b for a, b in zip(tried[0], tried[1], strict=True))
