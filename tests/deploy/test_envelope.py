"""A node carries out what the server has signed for it, once, and nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

import numpy as np  # noqa: E402
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict  # noqa: E402

from holdfast.core.errors import RunError  # noqa: E402
from holdfast.deploy import envelope  # noqa: E402
from holdfast.deploy.envelope import NodeSigner, Unsigned, sign_order  # noqa: E402
from holdfast.deploy.keys import load_private, make_node_key, make_server_key  # noqa: E402

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


def head(entries: int, name: str = "a") -> str:
    return json.dumps({"entries": entries, "head": name * 64, "at": "", "signature": ""})


def test_the_longest_ledger_that_was_shown_is_kept(
    signer: NodeSigner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "state" / "ledger.head"
    for number, entries in enumerate((5, 7)):
        signer.check(order(tmp_path, nonce=f"{number:032}", head=head(entries)))
        assert kept.read_text() == head(entries)
    assert capsys.readouterr().err == ""
    signer.check(order(tmp_path, nonce="9" * 32, head=head(6, "b")))
    assert kept.read_text() == head(7) and "has 6 entries and had 7" in capsys.readouterr().err
    for number, nonsense in enumerate(("", "[]", "{", '{"entries": -1}', '{"entries": true}', "[" * 5000)):
        signer.check(order(tmp_path, nonce=f"8{number:031}", head=nonsense))
    assert kept.read_text() == head(7)


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
