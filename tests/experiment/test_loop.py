"""The run loop: what evaluation asks of clients is numbered after the round's own exchanges and leaves no
trace."""

from __future__ import annotations

import torch

import holdfast
from holdfast.core.registry import register
from holdfast.core.types import ROOT, broadcast
from holdfast.engine.simulator import Simulator
from holdfast.experiment.loop import Experiment
from holdfast.methods import ClientRule, Method
from holdfast.methods.averaging import Averaging
from holdfast.storage.client_state import RowStore
from holdfast.storage.store import commit_all
from tests.helpers import tiny


class CountingClient(ClientRule):
    """Counts how often it has trained, in its private state."""

    def init(self, local):
        return {"times": torch.zeros(local.n, dtype=torch.int64)}

    def train(self, local, state, received, extra):
        fitted = local.fit(received.model)
        return {"times": state["times"] + 1}, local.report(fitted.model, received, fitted)


class AskingServer(Averaging):
    """Asks the clients to train before it says what they would receive, as FedCAP does for clients that were
    absent."""

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
        asked.extend(
            (c.run_context.round, c.exchange.task, c.exchange.step, c.exchange.discard_state) for c in calls
        )
        return original(self, calls)

    monkeypatch.setattr(Simulator, "exchange", watch)
    data = {"clients": 4, "partition": {"name": "iid", "samples_per_client": 20}}
    run = holdfast.run(
        method="test-asking", data=data, train={"rounds": 2, "local_epochs": 1}, out=tmp_path / "run"
    )
    one = [("train", 0, False), ("train", 1, True), ("evaluate", 2, False)]
    assert asked == [(round, *step) for round in (1, 2) for step in one]
    head = run.store.head()
    assert head is not None
    rows = RowStore(run.path / "rows", head[1]["rows/index"])
    assert rows.read(torch.arange(4))["times"].tolist() == [
        2,
        2,
        2,
        2,
    ]  # once a round; the rehearsals did not count
    assert run.final["bytes/down"] == 2 * 4 * run.manifest["parameters"] * 4  # nor do they cost traffic
    before = (run.path / "rows" / "records").read_bytes()
    run.vector(client=1, model="global")
    assert (run.path / "rows" / "records").read_bytes() == before


def test_a_round_begins_without_the_rows_of_an_unfinished_one(tmp_path, quick_disk):
    """Also where nobody has read the rows from the disk again in between."""
    experiment = Experiment(tiny(method="ditto"), tmp_path / "run")
    experiment.store.open()
    steps = experiment.steps()
    commit_all([next(steps)])
    committed, rows = torch.tensor([2]), experiment.run_context.rows
    rows.stage(committed, {"personal": torch.zeros(1, 3)})
    rows.settle()
    rows.stage(torch.tensor([0, 2]), {"personal": torch.ones(2, 3)})
    asked = steps.send(None)
    assert (experiment.run_context.round, asked.task) == (1, "train")
    assert rows.present(torch.arange(5)).tolist() == [False, False, True, False, False]
    assert rows.read(committed)["personal"].tolist() == [[0, 0, 0]]
    experiment.store.close()


def test_replies_of_clients_are_lost_and_never_the_servers_own(tmp_path):
    experiment = Experiment(
        tiny(aggregator="fltrust", data={"root": 10}, train={"dropout": 0.7}), tmp_path / "run"
    )
    asked, answered = broadcast("train", experiment.initial, torch.tensor([ROOT, 0, 1, 2, 3, 4])), []
    for experiment.run_context.round in range(1, 41):
        answered.append(experiment._lose(asked).to.tolist())
    assert all(ids[:1] == [ROOT] for ids in answered)
    assert 0.2 < sum(len(ids) - 1 for ids in answered) / (40 * 5) < 0.4
