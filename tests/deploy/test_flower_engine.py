"""Server and clients as Flower runs them, in one process: the simulator's bits, and what happens when clients
fail or cheat."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from flwr.app import ConfigRecord, Message  # noqa: E402

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced  # noqa: E402
from holdfast.core.errors import ConfigError, RunError  # noqa: E402
from holdfast.core.files import write_beside  # noqa: E402
from holdfast.core.keys import Key  # noqa: E402
from holdfast.core.registry import Part, register  # noqa: E402
from holdfast.core.types import Exchange, Field, State, Uplink, broadcast  # noqa: E402
from holdfast.data.federation import build_federation  # noqa: E402
from holdfast.deploy import wire  # noqa: E402
from holdfast.deploy.client_app import app  # noqa: E402
from holdfast.deploy.flower_engine import FlowerEngine, _screened  # noqa: E402
from holdfast.deploy.node import Node, expected, federated, fingerprint  # noqa: E402
from holdfast.deploy.server_app import serve  # noqa: E402
from holdfast.engine.simulator import Call, Simulator, empty_uplink  # noqa: E402
from holdfast.experiment.config import make_config  # noqa: E402
from holdfast.experiment.config_tables import read_config  # noqa: E402
from holdfast.experiment.loop import Experiment  # noqa: E402
from holdfast.local.client import Local, Received  # noqa: E402
from holdfast.local.losses import Batch  # noqa: E402
from holdfast.methods.averaging import Averaging  # noqa: E402
from holdfast.methods.base import ClientRule, Method  # noqa: E402
from holdfast.results.run import Run  # noqa: E402
from holdfast.storage.store import Store, read_tensors  # noqa: E402
from tests.deploy import reply_fields  # noqa: E402
from tests.deploy.local_grid import LocalGrid  # noqa: E402
from tests.deploy.worlds import (
    assert_same_runs,
    node_states,
    private_rows,
    same_bits,
    simulate,
    write_config,
)  # noqa: E402
from tests.helpers import methods_in_turn, some_now  # noqa: E402

METHODS = [
    name
    for name in methods_in_turn()
    if isinstance(name, str)
    or name.values[0]
    in (
        "fedrep",
        "fedbabu",
        "apfl",
        "pfedme",
        "clustered-fl",
        "fedamp",
        "fedfomo",
        "cd2-pfed",
        "fedproto",
        "fedpac",
        "gpfl",
    )
]


def settings(config: Path, out: Path) -> dict[str, Any]:
    return {"config": str(config), "out": str(out), "deadline": 0.2, "join": 5.0}


def federate(config: Path, out: Path, **options: Any) -> LocalGrid:
    """Play on a fresh server; nodes keep their disks between calls with the same `out`."""
    grid = LocalGrid(out.parent / f"{out.name}-nodes", settings(config, out), **options)
    serve(grid, settings(config, out))
    return grid


class Tape:
    """Remembers every exchange of an engine and its answer."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, Exchange, Uplink]] = []

    def note(self, calls: list[Call], answers: list[Uplink]) -> list[Uplink]:
        self.heard += [
            (call.run_context.round, call.exchange, up) for call, up in zip(calls, answers, strict=True)
        ]
        return answers

    def simulator(self, *args: Any) -> Any:
        inner, tape = Simulator(*args), self

        class Taped:
            close = inner.close

            def exchange(self, calls: Any) -> list[Uplink]:
                return tape.note(calls, inner.exchange(calls))

        return Taped()


@pytest.mark.parametrize("method", METHODS)
def test_every_exchange_has_the_simulators_bits(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under partial participation and lost replies, with validation data, all metrics and evaluation of
    clients outside the cohort."""
    split = "split = { train = 0.6, validation = 0.2, test = 0.2 }"
    train = (
        'participation = 0.67\ndropout = 0.2\n[evaluate]\nmetrics = ["macro_f1", "balanced_accuracy", "auc"]'
    )
    config = write_config(tmp_path, method, rounds=3, train=train, data=split)
    here, there = Tape(), Tape()
    simulate(config, tmp_path / "sim", engine=here.simulator)
    plain = FlowerEngine.exchange
    monkeypatch.setattr(FlowerEngine, "exchange", lambda self, calls: there.note(calls, plain(self, calls)))
    federate(config, tmp_path / "fed")
    assert len(here.heard) == len(there.heard) >= 3
    for (round, asked, up), (round_there, asked_there, up_there) in zip(here.heard, there.heard, strict=True):
        assert (round, asked.task, asked.step) == (round_there, asked_there.task, asked_there.step)
        assert torch.equal(asked.bank, asked_there.bank) and torch.equal(up.ids, up_there.ids)
        assert same_bits(dict(up.fields), dict(up_there.fields)), (round, asked.task)
    assert_same_runs(
        tmp_path / "sim", tmp_path / "fed", rounds=4 if method in ("c-pfl", "fedbabu") else 3
    )  # which tune after the last


def test_a_server_optimiser_steps_on_the_federations_server(tmp_path: Path) -> None:
    config = write_config(tmp_path, "fedavg", rounds=3, top='server = "fedadam"')
    simulate(config, tmp_path / "sim")
    federate(config, tmp_path / "fed")
    assert_same_runs(tmp_path / "sim", tmp_path / "fed", rounds=3)
    assert "server/optimizer/v" in Store(tmp_path / "fed").head()[1]  # type: ignore[index]


def test_what_detectors_and_rules_find_on_the_federations_server(tmp_path: Path) -> None:
    """Models answer inputs that the server makes up, and a history is kept from round to round."""
    deepsight = '{ name = "deepsight", samples = 20 }'
    names = ("flame", "multi-krum", "signguard", "alignins", "fldetector")
    top = f"detectors = [{', '.join((*map(repr, names), deepsight))}]\naggregator = {deepsight}"
    config = write_config(tmp_path, "fedavg", rounds=3, top=top)
    simulate(config, tmp_path / "sim")
    federate(config, tmp_path / "fed")
    assert_same_runs(tmp_path / "sim", tmp_path / "fed", rounds=3)
    scores = [name for name in Store(tmp_path / "fed").arrays(3) if name.startswith("verdict/scores/")]
    assert {name.split("/")[2] for name in scores} == {*names, "deepsight"}


def test_clients_keep_their_optimisers_state_on_their_own_disks(tmp_path: Path) -> None:
    """Adam, kept from round to round for both models of ditto, a schedule over steps and clipped
    gradients."""
    top = """
optimizer = { name = "adam", persist = true }
schedule = { name = "cosine", over = "steps", warmup = 2 }
"""
    train = "participation = 0.67\nclip_gradient = 0.5"
    config = write_config(tmp_path, "ditto", rounds=3, top=top, momentum="", train=train)
    simulate(config, tmp_path / "sim")
    federate(config, tmp_path / "fed")
    assert_same_runs(tmp_path / "sim", tmp_path / "fed", rounds=3)
    rows, states = private_rows(tmp_path / "sim"), node_states(tmp_path / "fed-nodes", round=3)
    assert rows.keys() == states.keys() and all(same_bits(rows[c], states[c]) for c in rows)
    assert all(bool((state["optimizer/train/fit/step"] > 0).all()) for state in rows.values())


def test_a_committee_of_real_clients(tmp_path: Path) -> None:
    """One of three clients scores the models of the others; then all tune."""
    config = write_config(
        tmp_path, "c-pfl", rounds=2, data="split = { train = 0.6, validation = 0.2, test = 0.2 }"
    )
    simulate(config, tmp_path / "sim")
    federate(config, tmp_path / "fed")
    assert_same_runs(tmp_path / "sim", tmp_path / "fed", rounds=3)
    assert Store(tmp_path / "fed").arrays(2)["verdict/tables/committee/votes"].shape == (1, 2)


def test_clients_in_a_chain_keep_what_they_aligned(tmp_path: Path) -> None:
    """FedAS as its authors run it: many exchanges in a round, and a training for which no model is sent."""
    config = write_config(tmp_path, "fedas", model='name = "cnn-bn"', train="local_steps = 2")
    config.write_text(config.read_text().replace('name = "fedas"', 'name = "fedas"\nvariant = "authors"'))
    simulate(config, tmp_path / "sim")
    federate(config, tmp_path / "fed")
    assert_same_runs(tmp_path / "sim", tmp_path / "fed", rounds=2)
    rows, states = private_rows(tmp_path / "sim"), node_states(tmp_path / "fed-nodes", round=2)
    assert len(rows) == 3 and all(same_bits(rows[c], states[c]) for c in rows)


def test_a_method_that_shares_its_backbone_only(tmp_path: Path, forget: None) -> None:
    """Fewer numbers travel than a model has, and BatchNorm's buffers travel beside them."""

    class Client(ClientRule):
        def shared(self, network: Any, round: int) -> torch.Tensor:
            return ~network.head

        def init(self, local: Local) -> State:
            return {"own": local.initial}

        def train(self, local: Local, state: State, received: Received, extra: Any) -> Any:
            fitted = local.fit(received.into(state["own"]))
            return {"own": fitted.model}, local.report(fitted.model, received, fitted)

        def personal(self, local: Local, state: State, received: Received) -> torch.Tensor:
            return received.into(state["own"])

    class Backbone(Method):
        """Shares the backbone, keeps the head."""

    Backbone.Client, Backbone.Server, Backbone.models, Backbone.deploys = (
        Client,
        Averaging,
        ("personal",),
        "personal",
    )
    register("method", "test-backbone")(Backbone)
    config = write_config(
        tmp_path, "test-backbone", model='name = "cnn-bn"', train="local_steps = 2", data="held_out = 1"
    )
    simulate(config, tmp_path / "sim")
    federate(config, tmp_path / "fed")
    assert_same_runs(tmp_path / "sim", tmp_path / "fed", rounds=2)
    rows, states = private_rows(tmp_path / "sim"), node_states(tmp_path / "fed-nodes", round=2)
    assert len(rows) == 2 and all(same_bits(rows[c], states[c]) for c in rows)


def test_private_models_live_on_the_clients_disks_only(tmp_path: Path) -> None:
    config = write_config(tmp_path, "ditto")
    simulate(config, tmp_path / "sim")
    federate(config, tmp_path / "fed")
    rows, states = private_rows(tmp_path / "sim"), node_states(tmp_path / "fed-nodes", round=2)
    assert rows.keys() == states.keys() == {0, 1, 2}
    assert all(same_bits(rows[c], states[c]) for c in rows)
    assert private_rows(tmp_path / "fed") == {}


def test_no_client_is_sent_more_than_its_own(tmp_path: Path) -> None:
    grid = federate(write_config(tmp_path, "ditto", rounds=1), tmp_path / "fed")
    work = [m for m in grid.asked if m.metadata.message_type != "query"]
    assert {m.metadata.message_type for m in work} == {"train", "evaluate"} and len(work) == 6
    for message in work:
        assert set(message.content) == {"header", "bank", "extra", "post"}
        assert message.content["bank"]["bank"].numpy().shape[0] == 1
        assert all(array.numpy().shape[0] == 1 for array in message.content["extra"].values())
    nonces = [m.content["post"]["nonce"] for m in grid.asked]
    assert len(set(nonces)) == len(nonces)


class Kill(BaseException):
    """As SIGKILL: nothing handles it."""


@pytest.mark.parametrize("last", some_now([4, 6, 9, 10, 13], every=3))
def test_a_server_that_was_killed_goes_on_with_the_same_bits(last: int, tmp_path: Path) -> None:
    """After so many messages: 3 that ask who is there, then 3 that train and 3 that evaluate, in each of two
    rounds. Ditto, because a private model that was trained twice in a replayed round would show."""
    config = write_config(tmp_path, "ditto", rounds=2)
    simulate(config, tmp_path / "sim")
    left = last

    def stop(request: Message, reply: Message) -> Message:
        nonlocal left
        left -= 1
        if left < 0:
            raise Kill
        return reply

    with pytest.raises(Kill):
        federate(config, tmp_path / "fed", tamper=stop)
    federate(config, tmp_path / "fed", attempt=2)
    assert_same_runs(tmp_path / "sim", tmp_path / "fed", rounds=2)
    rows, states = private_rows(tmp_path / "sim"), node_states(tmp_path / "fed-nodes", round=2)
    assert all(same_bits(rows[c], states[c]) for c in range(3))


def test_a_step_that_is_asked_again_starts_where_it_started_before(tmp_path: Path) -> None:
    """The node has answered and kept its new private model, but the answer was lost: the second one has the
    same bits. The next step goes on from there."""
    config = federated(write_config(tmp_path, "ditto"))
    experiment = Experiment(config, tmp_path / "server")
    node = Node(
        config,
        0,
        tmp_path / "node",
        fingerprint(config, experiment.federation.digest, experiment.initial),
        threads=1,
    )
    node.enter(1)
    asked = broadcast("train", experiment.initial, torch.tensor([0]))
    kept = [
        read_tensors(node._file((1, step)))
        for step in (0, 0, 1)
        if node.perform(replace(asked, step=step), 0, "first")
    ]
    assert same_bits(kept[0], kept[1]) and not same_bits(kept[1], kept[2])


def test_unfinished_files_of_a_killed_trainer_are_removed(tmp_path: Path) -> None:
    """By the next request; what a living process writes stays."""
    config = federated(write_config(tmp_path, "ditto"))
    experiment = Experiment(config, tmp_path / "server")
    node = Node(
        config,
        0,
        tmp_path / "node",
        fingerprint(config, experiment.federation.digest, experiment.initial),
        threads=1,
    )
    program = "import os, sys; from pathlib import Path; from holdfast.core.files import write_beside; "
    program += "write_beside(Path(sys.argv[1]), b'half'); os.kill(os.getpid(), 9)"
    (tmp_path / "node").mkdir()
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "node" / "000001-00.safetensors")])
    own = write_beside(tmp_path / "node" / "model.safetensors", b"half")
    assert len(list((tmp_path / "node").glob(".*.writing"))) == 2
    node.enter(1)
    node.perform(broadcast("train", experiment.initial, torch.tensor([0])), 0, "first")
    assert list((tmp_path / "node").glob(".*.writing")) == [own]


def test_a_client_left_out_of_the_replay_forgets_the_abandoned_round(tmp_path: Path) -> None:
    config = write_config(tmp_path, "ditto", rounds=1)

    def stop(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "evaluate":
            raise Kill
        return reply

    with pytest.raises(Kill):
        federate(config, tmp_path / "fed", tamper=stop)
    assert set(node_states(tmp_path / "fed-nodes", round=1)) == {0, 1, 2}

    grid = LocalGrid(tmp_path / "fed-nodes", settings(config, tmp_path / "fed"), attempt=2)
    deliver = grid._deliver

    def lose(message: Message) -> str:  # client 1 hears of the replay only when it is evaluated
        away = (message.metadata.dst_node_id, message.metadata.message_type) == (1001, "train")
        return "lost" if away else deliver(message)

    grid._deliver = lose  # type: ignore[method-assign]
    serve(grid, settings(config, tmp_path / "fed"))
    assert set(node_states(tmp_path / "fed-nodes", round=1)) == {0, 2}


def test_a_late_request_of_an_earlier_server_undoes_nothing(tmp_path: Path) -> None:
    config, out = write_config(tmp_path, "ditto", rounds=2), tmp_path / "fed"
    simulate(config, tmp_path / "sim")

    def stop(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "evaluate":
            raise Kill
        return reply

    first = LocalGrid(tmp_path / "fed-nodes", settings(config, out), tamper=stop)
    with pytest.raises(Kill):
        serve(first, settings(config, out))
    letters = [message for message in first.asked if message.metadata.message_type == "train"]
    late: list[str] = []

    def deliver_late(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train" and len(late) < len(
            letters
        ):  # each right after the new server's letter
            letter = letters[len(late)]
            with pytest.raises(RunError, match="an earlier start of the server"):
                app(letter, first.nodes[letter.metadata.dst_node_id])
            late.append("refused")
        return reply

    federate(config, out, attempt=2, tamper=deliver_late)
    assert len(late) == 3
    rows, states = private_rows(tmp_path / "sim"), node_states(tmp_path / "fed-nodes", round=2)
    assert all(same_bits(rows[c], states[c]) for c in range(3))


def test_a_run_of_another_config_is_not_continued(tmp_path: Path) -> None:
    federate(write_config(tmp_path, "fedavg", rounds=1), tmp_path / "fed")
    with pytest.raises(ConfigError, match="another config"):
        federate(write_config(tmp_path, "fedavg", rounds=2), tmp_path / "fed")


@pytest.mark.parametrize(
    ("module", "unwanted"), [("holdfast.sweeps.session", "flwr"), ("holdfast.deploy.client_app", "torch")]
)
def test_modules_do_not_import_what_they_do_not_need(module: str, unwanted: str) -> None:
    """The simulator does without Flower, and a client that is only asked who it is without torch."""
    code = f"import sys, {module}; sys.exit({unwanted!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


# ---- clients that fail or cheat


def part_of(out: Path, round: int) -> dict[str, Any]:
    return Store(out).parts(round)[round - 1]


def in_training(
    client: int, change: Callable[[Message], Message | None], round: int = 1
) -> Callable[[Message, Message], Message | None]:
    def tamper(request: Message, reply: Message) -> Message | None:
        mine = request.metadata.dst_node_id == 1000 + client and request.metadata.message_type == "train"
        return change(reply) if mine and request.content["header"]["round"] == round else reply

    return tamper


def test_a_silent_client_is_a_missing_row(tmp_path: Path) -> None:
    config = write_config(tmp_path, "fedavg", rounds=2)
    federate(config, tmp_path / "fed", tamper=in_training(1, lambda reply: None))
    arrays = Store(tmp_path / "fed").arrays(1)
    assert arrays["verdict/ids"].tolist() == [0, 2] and arrays["evaluate/ids"].tolist() == [0, 1, 2]
    assert part_of(tmp_path / "fed", 1)["refused"] == {}
    assert Store(tmp_path / "fed").arrays(2)["verdict/ids"].tolist() == [0, 1, 2]


def test_a_client_that_is_not_evaluated_is_missing_there_too(tmp_path: Path) -> None:
    config = write_config(tmp_path, "fedavg", rounds=1)

    def silent(request: Any, reply: Any) -> Any:
        asked = request.metadata.dst_node_id, request.metadata.message_type
        return None if asked == (1001, "evaluate") else reply

    federate(config, tmp_path / "fed", tamper=silent)
    assert Run(tmp_path / "fed").clients()["client"].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("update", float("nan"), "update is not finite"),
        ("count", -1.0, "count is below 0"),
        ("update", 1e9, "update has a norm above 100"),
        ("count", 10.5, "count is not a whole number"),
        ("loss", -1.0, "loss is below 0"),
        ("loss", float("inf"), "loss is not finite"),
        ("update", None, "update has shape"),
        ("extra", 0.0, "expected buffers, count, loss, update"),
    ],
)
def test_a_bad_reply_is_refused_with_its_reason(
    field: str, value: float | None, reason: str, tmp_path: Path
) -> None:
    def spoil(reply: Message) -> Message:
        old = torch.zeros(3) if field == "extra" else reply_fields.field(reply.content, field)
        changed = old[:-1] if value is None else torch.full_like(old, value)
        reply_fields.put(reply.content, field, changed)
        return reply

    config = write_config(tmp_path, "fedavg", rounds=1, train="norm_cap = 100.0")
    federate(config, tmp_path / "fed", tamper=in_training(2, spoil))
    part = part_of(tmp_path / "fed", 1)
    assert set(part["refused"]) == {"2"} and reason in part["refused"]["2"]
    assert part["metrics"]["refused"] == 1
    assert Store(tmp_path / "fed").arrays(1)["verdict/ids"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("train", "refused"), [("", {"2": "update has a norm above 1000"}), ("norm_cap = 1e12", {})]
)
def test_a_federation_has_a_cap_unless_it_is_set(train: str, refused: dict[str, str], tmp_path: Path) -> None:
    def stretch(reply: Message) -> Message:
        arrays = reply.content["fields"]
        arrays["update"] = wire._array(
            torch.full_like(torch.from_numpy(arrays["update"].numpy().copy()), 1e6)
        )
        return reply

    federate(
        write_config(tmp_path, "fedavg", rounds=1, train=train),
        tmp_path / "fed",
        tamper=in_training(2, stretch),
    )
    assert part_of(tmp_path / "fed", 1)["refused"] == refused


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("total", float("nan"), "is not finite"),
        ("total", 1e9, "is above {most}"),
        ("global/auc", 7.0, "is above 1"),
        ("global/auc", float("nan"), "is not finite"),
        ("global/correct", 1e6, "is not a number of samples"),
        ("global/correct", 0.5, "is not a number of samples"),
        ("global/loss", float("nan"), "is not a loss"),
        ("global/loss", -1.0, "is not a loss"),
    ],
)
def test_a_lying_measurement_is_refused(field: str, value: float, reason: str, tmp_path: Path) -> None:
    def lie(request: Message, reply: Message) -> Message:
        if (request.metadata.dst_node_id, request.metadata.message_type) == (1000, "evaluate"):
            assert f"test/{field}" in reply.content["small"]
            reply_fields.put(reply.content, f"test/{field}", torch.tensor(value, dtype=torch.float64))
        return reply

    config = write_config(tmp_path, "fedavg", rounds=1, train='[evaluate]\nmetrics = ["auc"]')
    federate(config, tmp_path / "fed", tamper=lie)
    part = part_of(tmp_path / "fed", 1)
    most = int(build_federation(make_config(read_config(config)).data, Key(3).fold("data")).test.counts.max())
    assert (
        part["refused"] == {"0": f"test/{field} {reason}".format(most=most)}
        and part["metrics"]["accuracy"] is not None
    )
    assert part["metrics"]["auc/clients"] == 2


@pytest.mark.parametrize("value", [float("inf"), 1e308])
def test_a_measured_loss_without_end_is_left_out_of_the_rounds_mean(value: float, tmp_path: Path) -> None:
    """It may be honest (a logit of -inf), so it is no fault, but one client must not blank what all have
    measured."""
    config, out = write_config(tmp_path, "fedavg", rounds=1), tmp_path / "fed"
    liars = {1001}

    def lie(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "evaluate" and request.metadata.dst_node_id in liars:
            reply_fields.put(reply.content, "test/global/loss", torch.tensor(value, dtype=torch.float64))
        return reply

    federate(config, out, tamper=lie)
    part, arrays = part_of(out, 1), Store(out).arrays(1)
    assert arrays["evaluate/ids"].tolist() == [0, 2] and part["refused"] == {} and not part.get("diverged")
    loss, total = arrays["evaluate/test/global/loss"], arrays["evaluate/test/total"]
    assert part["metrics"]["loss"] == float((loss[0] + loss[1]) / (total[0] + total[1]))
    liars.add(1000)  # then it is the model, and the last one cannot hide it
    federate(config, tmp_path / "all", tamper=lie)
    assert Store(tmp_path / "all").arrays(1)["evaluate/ids"].tolist() == [0, 1, 2]
    assert value < float("inf") or part_of(tmp_path / "all", 1)["diverged"] == "loss/global is not finite"


def test_class_counts_must_be_whole_and_no_rows_are_accepted() -> None:
    schema = {"count": Field("count", low=0), "held": Field("count", (2,), low=0)}
    up = Uplink(
        torch.tensor([4, 7]),
        {"count": torch.tensor([3.0, 3.0]), "held": torch.tensor([[1.0, 2.0], [2.5, 0.5]])},
    )
    found = _screened(up, schema, {1: "silent"}, "train", None)
    assert found.ids.tolist() == [4] and found.refused == {1: "silent", 7: "held is not a whole number"}
    assert len(_screened(empty_uplink(schema, torch.float32), schema, {}, "train", None)) == 0


def test_a_loss_of_ones_own_may_be_below_zero(tmp_path: Path, forget: None) -> None:
    @register("loss", "below-zero")
    class BelowZero(Part):
        """A plug-in's loss: honest, and below 0."""

        def __call__(self, net: Any, batch: Batch) -> torch.Tensor:
            return F.cross_entropy(net(batch.x), batch.y, reduction="none") - 100

    federate(write_config(tmp_path, "fedavg", rounds=1, train='loss = "below-zero"'), tmp_path / "fed")
    part = part_of(tmp_path / "fed", 1)
    assert part["refused"] == {} and -100 < part["metrics"]["loss/train"] < -90


def test_a_forged_reply_is_missing_not_refused(tmp_path: Path) -> None:
    def forge(reply: Message) -> Message:
        reply.content["post"] = ConfigRecord({"nonce": "0" * 32})
        return reply

    federate(write_config(tmp_path, "fedavg", rounds=1), tmp_path / "fed", tamper=in_training(0, forge))
    assert part_of(tmp_path / "fed", 1)["refused"] == {}
    assert Store(tmp_path / "fed").arrays(1)["verdict/ids"].tolist() == [1, 2]


def test_when_no_client_answers_the_run_stops_and_can_be_continued(tmp_path: Path) -> None:
    config = write_config(tmp_path, "fedavg", rounds=2)
    simulate(config, tmp_path / "sim")
    silent = lambda request, reply: reply if request.metadata.message_type == "query" else None  # noqa: E731
    with pytest.raises(
        RunError, match=r"round 1, train: no client answered \(client 0: no answer within 0.2 s\)"
    ):
        federate(config, tmp_path / "fed", tamper=silent)
    federate(config, tmp_path / "fed", attempt=2)
    assert_same_runs(tmp_path / "sim", tmp_path / "fed", rounds=2)


def test_a_late_client_that_does_not_answer_does_not_stop_the_run(tmp_path: Path) -> None:
    """The only client that is asked for a request never answers: the others go on, and it is simply not
    measured."""
    config = write_config(tmp_path, "fedcap", data="held_out = 1")
    (late,) = build_federation(make_config(read_config(config)).data, Key(3).fold("data")).held_out
    silent = lambda request, reply: None if request.metadata.dst_node_id == 1000 + late else reply  # noqa: E731
    federate(config, tmp_path / "fed", tamper=silent)
    final = Run(tmp_path / "fed").final
    assert final["accuracy"] is not None and final["accuracy/late"] is None


def test_a_client_with_another_config_says_so(tmp_path: Path) -> None:
    config = write_config(tmp_path, "fedavg", rounds=1)
    other = tmp_path / "other"
    other.mkdir()
    grid = LocalGrid(tmp_path / "nodes", settings(config, tmp_path / "fed"))
    for context in grid.nodes.values():
        context.node_config["config"] = str(write_config(other, "fedavg", rounds=1, train="lr = 0.5"))
    with pytest.raises(
        RunError, match="client 0: this node's config, plug-ins or data differ from the server's"
    ):
        serve(grid, settings(config, tmp_path / "fed"))


def test_nodes_that_cannot_be_clients_are_left_out(tmp_path: Path) -> None:
    config = write_config(tmp_path, "fedavg", rounds=1)
    grid = LocalGrid(
        tmp_path / "nodes", settings(config, tmp_path / "fed"), clients=5
    )  # 3 and 4 are no clients
    grid.nodes[1004].node_config["client-id"] = 1  # and this one is not the first to be client 1
    del grid.nodes[1000].node_config["client-id"]
    serve(grid, {**settings(config, tmp_path / "fed"), "join": 0.5})
    assert Store(tmp_path / "fed").arrays(1)["verdict/ids"].tolist() == [1, 2]
    worked = {m.metadata.dst_node_id for m in grid.asked if m.metadata.message_type == "train"}
    assert worked == {1001, 1002}


def test_without_clients_the_run_does_not_start(tmp_path: Path) -> None:
    config = write_config(tmp_path, "fedavg", rounds=1)
    grid = LocalGrid(tmp_path / "nodes", settings(config, tmp_path / "fed"), clients=0)
    with pytest.raises(RunError, match="no client joined within 0.1 s"):
        serve(grid, {**settings(config, tmp_path / "fed"), "join": 0.1})


def test_a_federation_must_know_how_many_clients_to_wait_for(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[data]\npartition = "by-user"\n')
    with pytest.raises(
        ConfigError, match="data.clients: a federation has to know how many clients to wait for"
    ):
        federated(config)
    config.write_text('[data]\npartition = "iid"\n')
    assert expected(federated(config)) == 20


def test_attacks_are_for_the_simulator(tmp_path: Path, forget: None) -> None:
    from holdfast.attacks.base import Attack

    register("attack", "test-nothing")(type("Nothing", (Attack,), {"__doc__": "Does nothing."}))
    with pytest.raises(ConfigError, match="attack: only the simulator has attackers"):
        federate(write_config(tmp_path, "fedavg", top='attack = "test-nothing"'), tmp_path / "fed")


def test_the_server_itself_is_the_root_client(tmp_path: Path, forget: None) -> None:
    class RootMean(Aggregator):
        """The mean of the clients' mean and the server's own update."""

        needs = frozenset({"root"})

        def __call__(self, x: torch.Tensor, w: torch.Tensor, state: Any, ctx: AggregationContext) -> Reduced:
            assert ctx.root is not None
            return Reduced((w @ x + ctx.root) / 2, w, state)

    register("aggregator", "test-root")(RootMean)
    chosen = 'aggregator = { name = "test-root", f = 1, wrap = ["lfr"] }'  # it also tests models itself
    config = write_config(tmp_path, "fedavg", top=chosen, data="root = 30")
    simulate(config, tmp_path / "sim")
    grid = federate(config, tmp_path / "fed")
    assert_same_runs(tmp_path / "sim", tmp_path / "fed", rounds=2)
    assert {m.metadata.dst_node_id for m in grid.asked} == {1000, 1001, 1002}
