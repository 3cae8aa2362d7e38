"""The run loop: what evaluation asks of clients is numbered after the round's own exchanges and leaves no trace."""

from __future__ import annotations

import torch

import holdfast
from holdfast.core.registry import register
from holdfast.core.types import broadcast
from holdfast.engine.simulator import Simulator
from holdfast.methods import ClientRule, Method
from holdfast.methods.averaging import Averaging
from holdfast.rows import RowStore


class CountingClient(ClientRule):
    """Counts how often it has trained, in its private state."""

    def init(self, local):
        return {"times": torch.zeros(local.n, dtype=torch.int64)}

    def train(self, local, state, received, extra):
        fitted = local.fit(received.model)
        return {"times": state["times"] + 1}, local.report(fitted.model, received, fitted)


class AskingServer(Averaging):
    """Asks the clients to train before it says what they would receive, as FedCAP does for clients that were absent."""

    def deliver(self, state, ctx, ids):
        up = yield broadcast("train", state["model"], ids)
        return broadcast("deliver", state["model"] + up["update"].mean(0), ids)


@register("method", "test-asking")
class Asking(Method):
    """A method whose delivery needs the clients."""

    Client, Server = CountingClient, AskingServer


def test_what_evaluation_asks_is_numbered_and_not_kept(tmp_path, monkeypatch):
    asked = []
    original = Simulator.exchange

    def watch(self, calls):
        asked.extend((c.cell.round, c.exchange.task, c.exchange.step, c.exchange.rehearsal) for c in calls)
        return original(self, calls)

    monkeypatch.setattr(Simulator, "exchange", watch)
    data = {"clients": 4, "partition": {"name": "iid", "samples_per_client": 20}}
    run = holdfast.run(method="test-asking", data=data, train={"rounds": 2, "local_epochs": 1}, out=tmp_path / "run")
    one = [("train", 0, False), ("train", 1, True), ("evaluate", 2, False)]
    assert asked == [(round, *step) for round in (1, 2) for step in one]
    head = run.store.head()
    assert head is not None
    rows = RowStore(run.path / "rows", head[1]["rows/index"])
    assert rows.read(torch.arange(4))["times"].tolist() == [2, 2, 2, 2]  # once a round; the rehearsals did not count
    assert run.final["bytes/down"] == 2 * 4 * run.manifest["parameters"] * 4  # nor do they cost traffic
    before = (run.path / "rows" / "records").read_bytes()
    run.vector(client=1, model="global")
    assert (run.path / "rows" / "records").read_bytes() == before
