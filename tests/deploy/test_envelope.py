"""A node carries out what the server has signed for it, once, and nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

import numpy as np  # noqa: E402
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict  # noqa: E402

from holdfast.core.errors import RunError  # noqa: E402
from holdfast.deploy import envelope  # noqa: E402
from holdfast.deploy.envelope import NodeSigner, Unsigned, sign_order  # noqa: E402
from holdfast.deploy.keys import load_private, make_node_key, make_server_key, sign  # noqa: E402
from holdfast.deploy.ledger import Ledger  # noqa: E402
from holdfast.deploy.server_keys import replace_server_key  # noqa: E402
from holdfast.deploy.server_memory import ServerLostRounds, ServerMemory  # noqa: E402

NONCE = "0" * 32


@pytest.fixture
def signer(tmp_path: Path) -> NodeSigner:
    make_node_key(tmp_path, "client-3")
    (tmp_path / "server.pub").write_text(make_server_key(tmp_path))
    settings = {
        "client-id": 3,
        "key": tmp_path / "key",
        "server-key": tmp_path / "server.pub",
        "state-dir": tmp_path / "state",
    }
    made = NodeSigner.of(settings)
    assert made is not None
    return made


def order(
    folder: Path,
    client: int = 3,
    nonce: str = NONCE,
    seconds: float = 60.0,
    head: str = "",
    key: str = "orders.key",
) -> RecordDict:
    content = RecordDict(
        {"header": ConfigRecord({"round": 1}), "bank": ArrayRecord({"bank": Array(np.zeros(4))})}
    )
    sign_order(content, load_private(folder / key), client, nonce, seconds, head)
    return content


def test_what_the_server_has_signed_is_accepted_once(signer: NodeSigner, tmp_path: Path) -> None:
    signer.check(order(tmp_path))
    with pytest.raises(Unsigned, match="performed before"):
        signer.check(order(tmp_path))
    signer.check(order(tmp_path, nonce="1" * 32))


def spoil_record(content: RecordDict) -> None:
    content["bank"] = ArrayRecord({"bank": Array(np.ones(4))})


def add_record(content: RecordDict) -> None:
    content["extra"] = ArrayRecord({})


def later(content: RecordDict) -> None:
    content["post"] = ConfigRecord({**content["post"], "expires": time.time() + 1e6})


def no_envelope(content: RecordDict) -> None:
    content["post"] = ConfigRecord({"nonce": NONCE})


def no_signature(content: RecordDict) -> None:
    content["post"] = ConfigRecord({**content["post"], "signature": "zz"})


@pytest.mark.parametrize("spoil", [spoil_record, add_record, later, no_envelope, no_signature])
def test_an_order_that_was_changed_is_rejected(
    signer: NodeSigner, tmp_path: Path, spoil: Callable[[RecordDict], None]
) -> None:
    content = order(tmp_path)
    spoil(content)
    with pytest.raises(Unsigned, match="rejected"):
        signer.check(content)
    assert not (tmp_path / "state" / "orders.json").exists()


def test_orders_for_another_client_by_another_key_or_long_past_are_rejected(
    signer: NodeSigner, tmp_path: Path
) -> None:
    for content in (order(tmp_path, client=2), order(tmp_path, key="key")):
        with pytest.raises(Unsigned, match="did not sign for this client"):
            signer.check(content)
    with pytest.raises(Unsigned, match="expired"):
        signer.check(order(tmp_path, seconds=-31))


def test_nonces_of_expired_orders_are_forgotten(
    signer: NodeSigner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signer.check(order(tmp_path, seconds=10))
    now = time.time()
    monkeypatch.setattr(envelope.time, "time", lambda: now + 100)  # type: ignore[attr-defined]
    signer.check(order(tmp_path, nonce="1" * 32))
    assert json.loads((tmp_path / "state" / "orders.json").read_text()).keys() == {"1" * 32}


def head(entries: int, name: str = "a", second: int = 0) -> str:
    at = f"2026-11-19T12:00:{second:02}+00:00"
    return json.dumps({"entries": entries, "head": name * 64, "at": at, "signature": ""})


def test_the_longest_ledger_that_was_shown_is_kept(signer: NodeSigner, tmp_path: Path) -> None:
    kept = tmp_path / "state" / "ledger.head"
    for number, entries in enumerate((5, 7)):
        signer.check(order(tmp_path, nonce=f"{number:032}", head=head(entries, second=number)))
        assert kept.read_text() == head(entries, second=number)
    signer.check(order(tmp_path, nonce="9" * 32, head=head(6, "b", second=0)))  # an order that came late
    for number, nonsense in enumerate(("", "[]", "{", '{"entries": -1}', '{"entries": true}', "[" * 5000)):
        signer.check(order(tmp_path, nonce=f"8{number:031}", head=nonsense))
    assert kept.read_text() == head(7, second=1)


@pytest.mark.parametrize("older", [head(6, second=2), head(7, "b", second=2)])
def test_a_server_that_lost_rounds_is_refused_until_the_owner_accepts_it(
    signer: NodeSigner, tmp_path: Path, older: str
) -> None:
    """Also when its ledger has grown beyond what the node has seen."""
    signer.check(order(tmp_path, head=head(7, second=1)))
    for number, shown in enumerate((older, head(30, "c", second=3))):
        with pytest.raises(ServerLostRounds, match="the server lost rounds.*accept-loss") as refused:
            signer.check(order(tmp_path, nonce=f"1{number:031}", head=shown))
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 200
    memory = ServerMemory(tmp_path / "state")
    assert "lost rounds" in memory.refused() and memory.accept("the disk failed").startswith("7 entries")
    signer.check(order(tmp_path, nonce="2" * 32, head=older))
    assert memory.refused() == "" and (tmp_path / "state" / "ledger.head").read_text() == older
    (evidence,) = (tmp_path / "state").glob("ledger-before-*.head")
    assert evidence.read_text() == head(7, second=1)
    assert "the disk failed" in (tmp_path / "state" / "server.json").read_text()


def test_an_order_from_before_a_committed_round_is_refused(tmp_path: Path) -> None:
    memory = ServerMemory(tmp_path)
    for run, committed in (("a", 0), ("a", 3), ("b", 0), ("a", 3)):
        memory.check("", run, committed)
    with pytest.raises(ServerLostRounds, match="follows round 2, and round 3 was committed already"):
        memory.check("", "a", 2)
    memory.check("", "a", 4)  # an old order alone is no proof
    assert memory.refused() == ""


def test_a_new_key_of_the_server_is_taken_if_the_old_one_has_signed_it(
    signer: NodeSigner, tmp_path: Path
) -> None:
    """Over several changes; a key that only a stranger has signed is not."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("server-key", key=signer.server)
    for _ in range(2):
        replace_server_key(ledger, "yearly")
    shown = (tmp_path / "ledger.head").read_text()
    signer.check(order(tmp_path, nonce="3" * 32, head=shown))
    new = (tmp_path / "orders.pub").read_text()
    assert (tmp_path / "server.pub").read_text() == new and new != signer.server
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    make_server_key(stranger)
    false = json.loads(shown)
    signature = sign(load_private(stranger / "orders.key"), "holdfast server key", b"x").hex()
    false["keys"] = [{"key": (stranger / "orders.pub").read_text().strip(), "signature": signature}]
    with pytest.raises(Unsigned, match="did not sign"):
        replace(signer, server=new).check(
            order(stranger, nonce="4" * 32, head=json.dumps(false), key="orders.key")
        )
    assert (tmp_path / "server.pub").read_text() == new


def test_without_the_servers_key_nothing_is_done(signer: NodeSigner, tmp_path: Path) -> None:
    settings = {
        "client-id": 3,
        "key": tmp_path / "key",
        "server-key": tmp_path / "none.pub",
        "state-dir": tmp_path / "state",
    }
    with pytest.raises(RunError, match="none.pub is missing.*enrol"):
        NodeSigner.of(settings)
    assert NodeSigner.of({"client-id": 3, "state-dir": tmp_path}) is None  # a trial without keys
