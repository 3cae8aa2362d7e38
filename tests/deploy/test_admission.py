"""A federation that goes by keys: strangers, strikes, bans, pardons, quorum; the real apps in one process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from flwr.app import Array, ArrayRecord, Message  # noqa: E402

from holdfast.core.errors import RunError  # noqa: E402
from holdfast.deploy import wire  # noqa: E402
from holdfast.deploy.admission import KeyedAdmission  # noqa: E402
from holdfast.deploy.audit import Audit  # noqa: E402
from holdfast.deploy.deadlines import paused  # noqa: E402
from holdfast.deploy.keys import make_server_key  # noqa: E402
from holdfast.deploy.ledger import Ledger  # noqa: E402
from holdfast.deploy.node import federated  # noqa: E402
from holdfast.deploy.wire import Header  # noqa: E402
from holdfast.experiment.loop import Experiment  # noqa: E402
from holdfast.results.run import Run  # noqa: E402
from tests.deploy import reply_fields  # noqa: E402
from tests.deploy.keyed_world import World, spoil  # noqa: E402
from tests.deploy.local_grid import LocalGrid  # noqa: E402
from tests.deploy.node_keys import a_key  # noqa: E402
from tests.deploy.worlds import assert_same_runs, simulate  # noqa: E402


def test_by_keys_the_simulators_bits(tmp_path: Path) -> None:
    world = World(tmp_path, rounds=2)
    simulate(world.config, tmp_path / "sim")
    world.run()
    assert_same_runs(tmp_path / "sim", world.out, 2)
    kinds = [entry.kind for entry in world.ledger.entries]
    assert kinds == ["enrol"] * 3 + ["start", "round", "round", "finish"]
    round = world.ledger.of("round")[0]
    assert round.what["took_part"] == [0, 1, 2] and len(round.what["weights"]) == 3
    assert round.what["accuracy"] == Run(world.out).metrics["accuracy"][0]


def test_an_unauthenticated_node_is_sent_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, rounds=1)
    grid = world.run(nodes=(0, 1, 2, 3))
    assert grid.asked_of(3) == 0 and grid.asked_of(0) > 0
    told = world.ledger.of("stranger")
    assert len(told) == 1 and told[0].what == {"node": "1003", "reason": "its key is not enrolled"}


def test_a_node_with_a_replaced_key_is_sent_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, rounds=1)
    world.ledger.append("rotate", 1, key=a_key()[0])
    grid = world.run()
    assert grid.asked_of(1) == 0 and grid.asked_of(0) > 0
    assert [entry.what["reason"] for entry in world.ledger.of("stranger")] == ["client 1 has another key now"]


def test_a_round_does_not_wait_for_a_client_that_has_left(tmp_path: Path) -> None:
    """`quorum` 1, and client 1 leaves without an answer: the round goes on at once. When all have left, the
    run stops and says so."""
    world = World(tmp_path, rounds=2, quorum=1.0, wait=600.0)

    def leave(message: Message, reply: Message) -> Message | None:
        if message.metadata.dst_node_id == 1001:
            if world.who.admitted == {0, 1, 2}:
                world.ledger.append("leave", 1)
            return None
        if message.content["header"]["round"] == 2 and 0 in world.who.admitted:
            for client in (0, 2):
                world.ledger.append("leave", client)
        return reply

    with pytest.raises(RunError, match="round 2, evaluate: all clients have left or are banned; enrol one"):
        world.run(leave)
    assert [entry.what["took_part"] for entry in world.ledger.of("round")] == [[0, 2]] and world.ledger.of(
        "wait", "strike"
    ) == []


def test_strikes_lead_to_a_ban_that_stays(tmp_path: Path) -> None:
    world = World(tmp_path, rounds=2, strikes=2)
    grid = world.run(spoil(1))
    assert [(e.client, e.round, e.what["reason"]) for e in world.ledger.of("strike")] == [
        (1, r, "update is not finite") for r in (1, 2)
    ]
    assert world.who.banned == {1: "2 strikes, the last: update is not finite"}
    last = [message.metadata.dst_node_id for message in grid.asked][-2:]
    assert sorted(last) == [
        1000,
        1002,
    ]  # the evaluation of the round in which it was banned: no model for it any more
    world.config.write_text(world.config.read_text().replace("rounds = 2", "rounds = 2\nlr = 0.02"))
    world.out = tmp_path / "next"  # another run of the same federation
    grid = world.run(attempt=2, out=str(world.out))
    assert grid.asked_of(1) == 0 and Run(world.out).clients()["client"].tolist() == [0, 2]


def test_the_operator_bans_in_mid_run_and_pardons(tmp_path: Path) -> None:
    world = World(tmp_path, rounds=3)
    swallowed: list[Message] = []

    def ban_in_round_two(message: Message, reply: Message) -> Message | None:
        if (
            message.metadata.message_type == "train"
            and message.content["header"]["round"] == 2
            and not swallowed
        ):
            swallowed.append(message)
            Ledger(world.ledger.path).append("ban", 2, reason="asked to leave", by="operator")
        return reply

    grid = world.run(ban_in_round_two)
    rounds = [m.content["header"]["round"] for m in grid.asked if m.metadata.dst_node_id == 1002]
    assert max(rounds) == 2 and world.who.banned == {2: "asked to leave"}
    assert [entry.what["took_part"] for entry in world.ledger.of("round")] == [[0, 1, 2], [0, 1], [0, 1]]
    world.ledger.append("unban", 2, reason="a misunderstanding", by="operator")
    world.out = tmp_path / "next"
    assert world.run(attempt=2, out=str(world.out)).asked_of(2) > 0


def boost(message: Message, reply: Message) -> Message:
    """Client 1 turns its update round and lengthens it."""
    if message.metadata.dst_node_id == 1001 and message.metadata.message_type == "train":
        fields = reply.content["fields"]
        assert isinstance(fields, ArrayRecord)
        fields["update"] = Array(-40 * fields["update"].numpy())
    return reply


def test_a_ban_by_the_method_is_in_the_ledger(tmp_path: Path) -> None:
    """FedCAP's norm test, with its default threshold."""
    world = World(tmp_path, rounds=2, method="fedcap")
    world.run(boost)
    bans = world.ledger.of("ban")
    assert (
        len(bans) == 1
        and bans[0].client == 1
        and bans[0].what["by"] == "method"
        and "norm" in bans[0].what["reason"]
    )
    assert world.grid.asked_of(1) < world.grid.asked_of(0)


def test_a_server_killed_while_it_records_a_ban_records_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, append = World(tmp_path, rounds=2, method="fedcap"), Ledger.append

    class Kill(BaseException):
        pass

    def killed(self: Ledger, kind: str, *args: Any, **what: Any) -> Any:
        if kind == "round" and self.of("ban"):
            raise Kill
        return append(self, kind, *args, **what)

    monkeypatch.setattr(Ledger, "append", killed)
    with pytest.raises(Kill):
        world.run(boost)
    assert len(world.ledger.of("ban")) == 1
    monkeypatch.undo()
    world.run(boost, attempt=2)
    assert len(world.ledger.of("ban")) == 1 and [entry.round for entry in world.ledger.of("round")] == [1, 2]


def header(round: int = 1, step: int = 0, run: str = "fed") -> Header:
    return Header(run, "train", round, step, discard_state=False, committed=round - 1, threads=1, world="w")


def admission_of(world: World, nodes: Iterable[int] = (0, 1, 2), strikes: int = 3) -> KeyedAdmission:
    """The admission alone, with these nodes outside."""
    there = [SimpleNamespace(node_id=1000 + i, public_key=world.keys[1000 + i]) for i in nodes]
    messaging = SimpleNamespace(grid=SimpleNamespace(get_nodes=lambda: there))
    return KeyedAdmission(messaging, world.clients, world.ledger, strikes)  # type: ignore[arg-type]


def test_the_faults_of_a_replayed_round_count_once(tmp_path: Path) -> None:
    """A server that was stopped finds them again; those of another step or round, or of another client, are
    new ones."""
    world = World(tmp_path)
    for _ in range(3):  # each with an admission of its own, as every start of the server has
        admission_of(world).record_exchange(header(), {1: "update is not finite"}, {})
    assert [(e.client, e.round) for e in world.ledger.of("strike")] == [(1, 1)] and world.who.banned == {}
    admission = admission_of(world)
    admission.record_exchange(header(), {1: "update is not finite", 2: "update is not finite"}, {})
    admission.record_exchange(header(step=1), {1: "update is not finite"}, {})
    assert [(e.client, e.round) for e in world.ledger.of("strike")] == [
        (1, 1),
        (2, 1),
        (1, 1),
    ] and world.who.banned == {}
    admission.record_exchange(header(round=2), {1: "update is not finite"}, {})
    assert world.who.banned == {1: "3 strikes, the last: update is not finite"}


def test_a_banned_client_does_not_count_as_connected(tmp_path: Path) -> None:
    world = World(tmp_path)
    admission = admission_of(world)
    assert admission.connected() == {0: 1000, 1: 1001, 2: 1002}
    Ledger(world.ledger.path).append("ban", 1, reason="asked to leave", by="operator")
    assert (
        admission.connected() == {0: 1000, 2: 1002}
        and not admission.admits(1)
        and admission.admitted_count(3) == 2
    )


def test_the_operators_bans_and_pardons_are_brought_into_the_run(tmp_path: Path) -> None:
    """Before the first exchange and after every one: the next cohort is drawn among the others."""
    world = World(tmp_path)
    ledger, experiment = world.ledger, Experiment(federated(world.config), world.out)
    ledger.append("ban", 1, reason="asked to leave", by="operator")
    audit = Audit(ledger, world.out)
    audit.begin([experiment])
    assert experiment.participation.banned == {
        1: "asked to leave"
    } and experiment.context().cohort.tolist() == [
        0,
        2,
    ]
    ledger.append("unban", 1, reason="a misunderstanding", by="operator")
    ledger.append("ban", 2, reason="left", by="operator")
    audit.follow(experiment)
    assert experiment.participation.banned == {2: "left"} and experiment.context().cohort.tolist() == [0, 1]


def test_a_client_that_leaves_after_its_answer_is_not_missing(tmp_path: Path) -> None:
    """Client 1 has to be asked twice; meanwhile client 0, whose answer is here, disconnects."""
    world = World(tmp_path, rounds=1, quorum=1.0, wait=60.0)
    lost: list[int] = []

    def lose_one(message: Message, reply: Message) -> Message | None:
        if message.metadata.dst_node_id == 1001 and message.metadata.message_type == "train":
            lost.append(1)
            world.grid.keys = {
                1000 + i: world.keys[1000 + i] for i in ((1, 2) if len(lost) == 1 else (0, 1, 2))
            }
            return None if len(lost) == 1 else reply
        return reply

    world.run(lose_one)
    assert len(lost) == 2 and world.ledger.of("missing") == []
    assert world.ledger.of("round")[0].what["took_part"] == [0, 1, 2]


def test_another_run_counts_its_own_strikes(tmp_path: Path) -> None:
    world = World(tmp_path, rounds=1, strikes=2)
    world.run(spoil(1))
    assert world.who.banned == {}
    world.out = tmp_path / "next"
    world.run(spoil(1), attempt=2, out=str(world.out))
    assert [(e.client, e.round) for e in world.ledger.of("strike")] == [
        (1, 1),
        (1, 1),
    ] and 1 in world.who.banned


def test_without_a_quorum_it_waits_asks_again_and_has_the_same_bits(tmp_path: Path) -> None:
    world = World(tmp_path, rounds=2, quorum=1.0, wait=60.0)
    simulate(world.config, tmp_path / "sim")
    lost: list[int] = []

    def lose_some(message: Message, reply: Message) -> Message | None:
        if message.metadata.dst_node_id == 1001 and len(lost) < 2:
            lost.append(1)
            return None
        return reply

    world.run(lose_some)
    assert len(lost) == 2
    assert_same_runs(tmp_path / "sim", world.out, 2)


def test_a_committee_with_a_member_down_votes_without_it(tmp_path: Path) -> None:
    """C-PFL: one member never scores; the round is decided by the others, and it is told who was missing."""
    world = World(tmp_path, rounds=2, method="c-pfl", clients=5)
    asked: list[int] = []

    def dead_member(message: Message, reply: Message) -> Message | None:
        if (
            "header" in message.content
            and message.content["header"]["task"] == "score"
            and not message.content["header"]["discard_state"]
        ):
            member = message.metadata.dst_node_id - 1000
            asked.append(member)
            return None if member == asked[0] else reply
        return reply

    world.run(dead_member)
    silent = [entry for entry in world.ledger.of("missing") if entry.what["task"] == "score"]
    assert len(set(asked)) >= 3 and silent and all(str(asked[0]) in entry.what["clients"] for entry in silent)
    assert len(world.ledger.of("round")) == 3 and world.who.banned == {}  # two, and the tuning at the end
    assert Run(world.out).final["accuracy"] is not None


def test_when_the_waiting_time_is_over_the_run_stops_and_can_be_continued(tmp_path: Path) -> None:
    world = World(tmp_path, rounds=2, quorum=0.9)
    simulate(world.config, tmp_path / "sim")

    def silent_in_round_two(message: Message, reply: Message) -> Message | None:
        gone = message.metadata.dst_node_id == 1001 and message.content["header"]["round"] == 2
        return None if gone else reply

    with pytest.raises(
        RunError,
        match=(
            "round 2, train: 2 of 3 clients answered, fewer than the quorum .client 1: no answer within"
            " 0.2 s."
        ),
    ):
        world.run(silent_in_round_two)
    assert [entry.kind for entry in world.ledger.entries[3:]] == ["start", "round"]
    world.run(attempt=2)
    assert_same_runs(tmp_path / "sim", world.out, 2)
    assert [entry.kind for entry in world.ledger.entries[3:]] == [
        "start",
        "round",
        "resume",
        "round",
        "finish",
    ]


# ---- what cannot be attributed, and who never answers


def test_replies_changed_on_the_way_are_dropped_without_a_strike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six forged replies once had two honest clients banned for good."""
    monkeypatch.setattr(LocalGrid, "signs", False)
    world = World(tmp_path, rounds=2, strikes=1)
    world.run(spoil(1))
    assert world.ledger.of("strike", "ban") == []
    dropped = "a reply that cannot be attributed: it is not signed with the client's key"
    assert [entry.what["clients"] for entry in world.ledger.of("missing")] == [{"1": dropped}] * 2
    assert [entry.what["ids"] for entry in world.ledger.of("round")] == [[0, 2]] * 2


def test_a_node_does_nothing_that_the_server_has_not_signed(tmp_path: Path) -> None:
    """An order of somebody else, who has the node's id: nothing is trained, no state is written, no privacy
    is spent."""
    world = World(tmp_path, rounds=1)
    attacker = make_server_key(tmp_path / "homes" / "3")
    for home in world.homes:
        (home / "server.pub").write_text(attacker)  # to these nodes it is the server who is the stranger
    with pytest.raises(
        RunError, match="no client answered .client 0: error 2: .*did not sign for this client"
    ):
        world.run()
    assert not list((tmp_path / "nodes").rglob("*.safetensors")) and not list(
        (tmp_path / "nodes").rglob("orders.json")
    )
    assert world.ledger.of("strike", "ban", "round") == []


def test_the_ledger_names_the_client_whose_reply_was_read_when_the_server_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, read = World(tmp_path, rounds=1), wire.read_fields

    class Killed(BaseException):
        """Nothing is run after it, as after SIGKILL."""

    def kill(content: Any, *args: Any) -> Any:
        if float(reply_fields.field(content, "count")) == counts[1]:
            (tmp_path / "copy.json").write_bytes((tmp_path / "reading.json").read_bytes())
            raise Killed
        return read(content, *args)

    counts = Experiment(federated(world.config), tmp_path / "x").federation.train.counts.tolist()
    assert len(set(counts)) == 3
    monkeypatch.setattr(wire, "read_fields", kill)
    with pytest.raises(Killed):
        world.run()
    (tmp_path / "copy.json").rename(tmp_path / "reading.json")
    monkeypatch.undo()
    world.run(attempt=2)
    (suspect,) = world.ledger.of("suspect")
    assert (suspect.client, suspect.round, suspect.what["task"]) == (1, 1, "train") and not (
        tmp_path / "reading.json"
    ).exists()
    assert len(world.ledger.of("round")) == 1 and world.ledger.of("strike") == []


def test_a_client_that_never_answers_is_paused_named_and_asked_again(tmp_path: Path) -> None:
    """Two exchanges a round: after three misses it is not asked in the rest of round 2 and in round 3. In
    round 4 it answers."""
    world = World(tmp_path, rounds=5)

    def mute(message: Message, reply: Message) -> Message | None:
        return (
            None if message.metadata.dst_node_id == 1001 and message.content["header"]["round"] < 4 else reply
        )

    grid = world.run(mute)
    asked = [
        (m.content["header"]["round"], m.metadata.message_type)
        for m in grid.asked
        if m.metadata.dst_node_id == 1001
    ]
    assert asked == [
        (1, "train"),
        (1, "evaluate"),
        (2, "train"),
        (4, "train"),
        (4, "evaluate"),
        (5, "train"),
        (5, "evaluate"),
    ]
    (pause,) = world.ledger.of("pause")
    assert (pause.client, pause.round, pause.what["until"]) == (1, 2, 4)
    missing = [
        (entry.round, entry.what["task"], entry.what["clients"]["1"]) for entry in world.ledger.of("missing")
    ]
    assert missing[2:] == [
        (2, "train", "no answer within 0.2 s"),
        *((r, t, "paused until round 4") for r, t in ((2, "evaluate"), (3, "train"), (3, "evaluate"))),
    ]
    assert [entry.what["took_part"] for entry in world.ledger.of("round")] == [[0, 2]] * 3 + [[0, 1, 2]] * 2
    second = world.ledger.of("round")[1].number  # as `status` names it then, and after the end
    assert paused(world.ledger.entries[: second + 1]) == {1: 4} and paused(world.ledger.entries) == {}


def test_where_the_quorum_needs_them_the_paused_are_asked(tmp_path: Path) -> None:
    world = World(tmp_path, rounds=3, quorum=1.0, wait=60.0)
    lost: list[int] = []

    def late(message: Message, reply: Message) -> Message | None:
        if message.metadata.dst_node_id == 1001 and len(lost) < 4:
            lost.append(1)
            return None
        return reply

    world.run(late)
    assert len(lost) == 4 and len(world.ledger.of("pause")) == 1
    assert [entry.what["took_part"] for entry in world.ledger.of("round")] == [[0, 1, 2]] * 3


def test_where_others_are_gone_the_paused_are_asked_too(tmp_path: Path) -> None:
    """Two of three are the quorum: client 1 is paused, and then client 2 disconnects."""
    world = World(tmp_path, rounds=3, quorum=0.6, wait=60.0)

    def mute_then_gone(message: Message, reply: Message) -> Message | None:
        round = message.content["header"]["round"]
        if round == 3 and 1002 in world.grid.keys:
            world.grid.keys = {node: key for node, key in world.grid.keys.items() if node != 1002}
        return None if message.metadata.dst_node_id == 1001 and round < 3 else reply

    grid = world.run(mute_then_gone)
    assert [entry.what["until"] for entry in world.ledger.of("pause")] == [4] and world.ledger.of("finish")
    asked = [
        (m.content["header"]["round"], m.metadata.message_type)
        for m in grid.asked
        if m.metadata.dst_node_id == 1001
    ]
    assert asked[-1] == (3, "evaluate")
