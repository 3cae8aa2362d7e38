"""Private rows on a device between rounds. Clients train on the host: the pretended GPU has no autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.core.types import State
from holdfast.engine import device_rows
from holdfast.engine.client_stack import ClientStack
from holdfast.engine.device_rows import DeviceRows
from holdfast.engine.lockstep import RunDriver, drive
from holdfast.engine.simulator import Simulator
from holdfast.experiment.build import shared_samples
from holdfast.experiment.loop import Experiment
from holdfast.local.plan import Plan
from holdfast.storage.client_state import RowStore
from holdfast.storage.store import Store
from holdfast.storage.write_behind import WriteBehind
from tests.experiment.kills import bits
from tests.helpers import tiny
from tests.pretended_gpu import PretendedGpu, pretended_gpu

ROW = 2 * 4 + 8
"""Bytes of a row of `rows`."""


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as gpu:
        yield gpu


def rows(ids: list[int], stamp: int, gpu: PretendedGpu) -> State:
    """Rows that tell whose they are and when they were left."""
    own = torch.tensor(ids) * 100 + stamp
    state = {"own": torch.stack([own, own], 1).float(), "seen": own}
    return {name: value.to(gpu.device) for name, value in state.items()}


def calls(*asked: tuple[RowStore, list[int]]) -> list[Any]:
    return [
        SimpleNamespace(
            run_context=SimpleNamespace(rows=store), exchange=SimpleNamespace(to=torch.tensor(ids))
        )
        for store, ids in asked
    ]


def stage(kept: DeviceRows, stamp: int, gpu: PretendedGpu, *given: tuple[RowStore, list[int]]) -> None:
    """What a stack of these clients leaves."""
    pieces, start = [], 0
    for store, ids in given:
        pieces.append((store, torch.tensor(ids), slice(start, start + len(ids))))
        start += len(ids)
    kept.stage(pieces, rows([client for _, ids in given for client in ids], stamp, gpu))


def seen(kept: DeviceRows, gpu: PretendedGpu, *asked: tuple[RowStore, list[int]]) -> list[int]:
    """What is read, without counting how the test looks at it."""
    _, found = kept.read(calls(*asked))
    with gpu.not_counted():
        assert all(value.device == gpu.device for value in found.values())
        assert found["own"].cpu()[:, 1].long().equal(found["seen"].cpu())
        return [int(value) for value in found["seen"].tolist()]


@pytest.mark.parametrize(
    ("bound", "behind"), [(1 << 20, 1 << 20), (7 * ROW, 1 << 20), (0, 1 << 20), (1 << 20, 0)]
)
def test_rows_are_the_same_wherever_they_are(
    tmp_path: Path, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, bound: int, behind: int
) -> None:
    """Of two experiments in one stack, in rounds with other clients each, with an exchange that is taken
    back; with all on the device, a part, or none, written behind or at once."""
    monkeypatch.setattr(device_rows, "most_behind", lambda: behind)
    kept = DeviceRows(gpu.device, bound)
    stores = [Store(tmp_path / name).open() for name in "ab"]
    a, b = (RowStore(store.path / "rows") for store in stores)
    expected: dict[tuple[RowStore, int], int] = {}
    with closing(WriteBehind()) as writer:
        for round, (of_a, of_b) in enumerate([([0, 1, 2], [0, 5]), ([2, 3], [1]), ([0, 1, 2, 3], [5, 1])], 1):
            for store in (a, b):
                store.begin()
                store.keep()
            stage(kept, 90 + round, gpu, (a, of_a), (b, of_b))
            for store in (a, b):
                store.restore()
            stage(kept, round, gpu, (a, of_a[:1]))  # in other stacks
            stage(kept, round, gpu, (a, of_a[1:]), (b, of_b))
            for store, ids in ((a, of_a), (b, of_b)):
                expected |= {(store, client): client * 100 + round for client in ids}
            for moment in ("staged", "on its way"):
                for store in (a, b):
                    ids = [client for whose, client in expected if whose is store][::-1]
                    assert seen(kept, gpu, (store, ids)) == [expected[store, i] for i in ids], moment
                if moment == "staged":
                    writer.done(None)
                    ready = [s.prepare(round, {}, {}, {}, r) for s, r in zip(stores, (a, b), strict=True)]
                    assert writer.begin(ready, lambda work, items: [work(item) for item in items])
        writer.done(None)
    for store, whose in zip(stores, (a, b), strict=True):
        head = store.head()
        assert head is not None
        ids = torch.tensor([client for which, client in expected if which is whose])
        written = RowStore(store.path / "rows", head[1]["rows/index"]).read(ids)["seen"].tolist()
        assert written == [expected[whose, client] for client in ids.tolist()]
        assert not whose.unwritten
        store.close()
    (slots,) = kept._slots.values()
    used = [slot for store in (a, b) for slot in store._slots.values()]
    assert sorted([*used, *slots.free]) == list(range(slots.count)), "each slot has one owner"
    assert slots.count * ROW <= bound


def test_a_round_reads_rows_on_the_device_and_copies_new_ones_once(tmp_path: Path, gpu: PretendedGpu) -> None:
    kept, store = DeviceRows(gpu.device), RowStore(tmp_path)
    stage(kept, 1, gpu, (store, [0, 1, 2]))
    store.write()
    store.settle()
    before, sent = gpu.bytes_to_host, gpu.bytes_to_device
    for _ in range(3):
        kept.read(calls((store, [2, 0])))
    stage(kept, 2, gpu, (store, [0, 2]))
    assert gpu.bytes_to_host - before == 2 * ROW, "the copy that is written"
    assert gpu.bytes_to_device - sent < 200, "places of rows alone"


def test_a_run_on_a_device_gives_the_rows_of_one_on_the_host(
    tmp_path: Path, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two experiments in chunks of three clients, with a part of the clients in each round; and the same
    where another process goes on."""
    perform, real = ClientStack.perform, Simulator

    def on_the_host(self: ClientStack, stack: Any, known: Tensor, stored: State) -> Any:
        with gpu.not_counted():
            host = ClientStack(self.plans)
            state, sent = perform(host, stack, known, {name: value.cpu() for name, value in stored.items()})
            there = None if state is None else {name: value.to(gpu.device) for name, value in state.items()}
            return there, sent

    def run(name: str, device: torch.device, last: int) -> list[Path]:
        tables = [
            {"method": "ditto", "seed": seed, "train": {"rounds": 4, "participation": 0.6}} for seed in (0, 1)
        ]
        configs = [tiny(**table) for table in tables]
        experiments = [
            Experiment(config, tmp_path / f"{name}{place}", "", samples)
            for place, (config, samples) in enumerate(zip(configs, shared_samples(configs), strict=True))
        ]
        for experiment in experiments:
            experiment.store.open()
        engine = real({experiments[0].run_context.plan_key: Plan("vmap", rows=6)}, device)
        exchange = engine.exchange

        def asked(calls: Any) -> Any:
            if calls[0].run_context.round > last:
                raise KeyboardInterrupt
            return exchange(calls)

        monkeypatch.setattr(engine, "exchange", asked)
        try:
            drive(engine, [RunDriver(e.run_context, e.steps()) for e in experiments])
        except KeyboardInterrupt:
            assert last == 2
        for experiment in experiments:
            experiment.store.close()
        return [experiment.out for experiment in experiments]

    wanted = run("host", torch.device("cpu"), 4)
    monkeypatch.setattr(ClientStack, "perform", on_the_host)
    for last in (2, 4):
        found = run("device", gpu.device, last)
    for one, other in zip(found, wanted, strict=True):
        assert bits(one) == bits(other)
        assert (one / "rows" / "records").read_bytes() == (other / "rows" / "records").read_bytes()
