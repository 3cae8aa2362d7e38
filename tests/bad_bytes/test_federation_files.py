"""Damaged and hostile files of a federation's folder and of a node's: one line that names the file, no
traceback, no hang."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr")
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa  # noqa: E402
from cryptography.hazmat.primitives.serialization import (  # noqa: E402
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from holdfast.core.errors import ConfigError, HoldfastError, RunError  # noqa: E402
from holdfast.deploy.audit import Audit  # noqa: E402
from holdfast.deploy.enrolment import Enrolment, fingerprint_of  # noqa: E402
from holdfast.deploy.inspect import clients  # noqa: E402
from holdfast.deploy.keys import (
    expires,
    hosts_of,
    make_authority,
    make_node_key,
    make_server_certificate,
    public_of,
)  # noqa: E402
from holdfast.deploy.ledger import Ledger  # noqa: E402
from holdfast.deploy.privacy import Account  # noqa: E402
from holdfast.deploy.project import FederationSettings, Project, open_node, open_project  # noqa: E402
from tests.bad_bytes.helpers import budget, one_line  # noqa: E402

QUICK = budget(60)


# ---- federation.toml and node.toml ----


@pytest.mark.parametrize(
    "content",
    [
        b'name = "\xff"',
        b"a = " + b"[" * 100_000,
        b"port",
        b".".join([b"a"] * 5000) + b" = 1",
        b"clients = 9",
        b"plugins = 3",
        b"[privacy]\nclip = nan",
        b"client = " + b"9" * 9999,
    ],
    ids=range(8),
)
@pytest.mark.parametrize("name, read", [("federation.toml", open_project), ("node.toml", open_node)])
def test_settings_that_cannot_be_used_are_one_line(
    tmp_path: Path, name: str, read: Callable[[Path], Any], content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read(tmp_path)
    one_line(error.value, name.removesuffix(".toml"))


def test_a_folder_in_place_of_the_settings_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "node.toml").mkdir()
    with pytest.raises(ConfigError, match="node.toml cannot be read"):
        open_node(tmp_path)


# ---- the ledger ----


def chained(*contents: dict[str, Any]) -> bytes:
    """Lines whose hashes are right, as somebody with the file writes them."""
    out, head = b"", "0" * 64
    for number, content in enumerate(contents):
        line = (
            json.dumps(
                {"number": number, "at": "2026-01-01T00:00:00+00:00", "kind": "x", "before": head, **content}
            ).encode()
            + b"\n"
        )
        out, head = out + line, hashlib.sha256(line).hexdigest()
    return out


DEEP = b'{"what":' * 100_000 + b"{}" + b"}" * 100_000
LINES = {
    "deep": DEEP,
    "a list": b"[]",
    "nothing": b"",
    "a number": b"1",
    "not UTF-8": b'{"kind": "\xff"}',
    "other keys": b'{"before": "0", "a": 1}',
    "NaN": b'{"before": "0", "number": NaN}',
}
ENTRIES = {
    "a client of 1e308": {"client": 1e308},
    "a client that is a word": {"client": "3"},
    "a client below 0": {"client": -1},
    "a round of 1e308": {"round": 1e308},
    "a true round": {"round": True},
    "a round that is a list": {"round": [1]},
    "no table": {"what": 3},
    "a kind that is none": {"kind": ["ban"]},
    "a time that is none": {"at": "yesterday"},
    "a number for a time": {"at": 5},
    "deep": {"what": json.loads('{"a":' * 100 + "1" + "}" * 100)},
    "an enrolment without a key": {"kind": "enrol", "client": 1},
    "clients that are none": {"kind": "round", "what": {"took_part": 5}},
    "ids that are none": {"kind": "round", "what": {"ids": 5}},
    "accuracy that is none": {"kind": "round", "what": {"accuracy": "high"}},
    "missing nobody": {"kind": "missing", "round": 1, "what": {"clients": 5}},
    "missing nothing": {"kind": "missing", "round": 1},
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_line_that_is_no_entry_is_one_line(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "l.jsonl").write_bytes(line + b"\n")
    with pytest.raises(RunError) as error:
        Ledger(tmp_path / "l.jsonl")
    one_line(error.value, "l.jsonl is damaged: line 1 is not an entry")


@pytest.mark.parametrize("content", ENTRIES.values(), ids=ENTRIES)
def test_an_entry_with_other_content_is_one_line(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "l.jsonl").write_bytes(chained({"kind": "start"}, content))
    with pytest.raises(RunError) as error:
        Ledger(tmp_path / "l.jsonl")
    one_line(error.value, "l.jsonl is damaged: line 2 is not an entry")


def test_an_enrolment_with_an_invalid_key_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "l.jsonl").write_bytes(
        chained({"kind": "start"}, {"kind": "enrol", "client": 1, "what": {"key": "ssh-rsa A"}})
    )
    with pytest.raises(RunError) as error:
        Enrolment.of(Ledger(tmp_path / "l.jsonl").entries)
    one_line(error.value, "line 2 enrols client 1 with a key that is not a public key")


def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "l.jsonl").write_bytes(chained({"kind": "start"}))
    os.truncate(tmp_path / "l.jsonl", 1 << 40)
    monkeypatch.setattr("holdfast.deploy.ledger._LINE", 1 << 22)
    with pytest.raises(RunError, match="l.jsonl is damaged: line 2 is longer than"):
        Ledger(tmp_path / "l.jsonl")


def test_a_ledger_of_many_pieces_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.deploy.ledger._PIECE", 100)  # shorter than a line
    (tmp_path / "l.jsonl").write_bytes(
        chained(*({"kind": "strike", "client": n} for n in range(20))) + b'{"half'
    )
    ledger = Ledger(tmp_path / "l.jsonl")
    assert [entry.client for entry in ledger.entries] == list(range(20))
    ledger.append("finish")
    assert Ledger(tmp_path / "l.jsonl").head == ledger.head and len(ledger.entries) == 21


WHAT = ["key", "reason", "took_part", "ids", "weights", "scores/a", "clients", "run", "accuracy"]
VALUE = st.recursive(
    st.none() | st.booleans() | st.sampled_from([-1, 0, 2, 10**30, 1e308]) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2),
    max_leaves=3,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "kind": (
            st.sampled_from(
                ["enrol", "rotate", "ban", "unban", "strike", "leave", "round", "missing", "finish"]
            )
            | VALUE
        ),
        "client": st.integers(0, 3) | VALUE,
        "round": st.integers(0, 3) | VALUE,
        "at": VALUE,
        "what": VALUE | st.dictionaries(st.sampled_from(WHAT), VALUE | st.just({"1": "late"}), max_size=3),
    },
)


@QUICK
@given(st.lists(ENTRY, max_size=3), st.binary(max_size=20))
def test_any_ledger_is_read_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, contents: list[dict[str, Any]], rest: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any"
    (folder / "server").mkdir(parents=True, exist_ok=True)
    project = Project(folder, FederationSettings())
    for lines in (chained(*contents), chained(*contents) + rest + b"\n"):
        (project.server / "ledger.jsonl").write_bytes(lines)
        try:
            Enrolment.of(project.ledger().entries)
            clients(project)
        except HoldfastError as error:
            one_line(error)


def test_a_head_of_a_billion_rounds_does_not_become_as_many_lines(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "head.json").write_text('{"round": 1000000000, "state": "state/000001.safetensors"}')
    audit = Audit(Ledger(tmp_path / "l.jsonl"), tmp_path / "run")
    with pytest.raises(RunError, match="parts/000001.json of a committed round is missing"):
        audit.finish({"rounds": 1, "final": {}})
    assert not (tmp_path / "l.jsonl").exists()


# ---- what a node has spent ----

SPENT = [b"[]", b"{}", b"\xff", b'{"releases": ' + b"[" * 10_000] + [
    b'{"releases": ' + told + b"}"
    for told in (
        b"3",
        b"null",
        b"[3]",
        b"[[1, 2, 3]]",
        b'[["a", 1]]',
        b"[[1, 1.5]]",
        b"[[1, -4]]",
        b"[[-1, 4]]",
        b"[[NaN, 1]]",
        b"[[1e999, 1]]",
        b"[[1, 1e308]]",
        b"[[true, 1]]",
    )
]


@pytest.mark.parametrize("content", SPENT, ids=range(len(SPENT)))
def test_an_account_that_cannot_be_read_is_one_line_and_never_nothing_spent(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "privacy.json").write_bytes(content)
    with pytest.raises(RunError) as error:
        Account(tmp_path).with_more(1.0)
    one_line(error.value, "privacy.json")


@QUICK
@given(
    st.dictionaries(
        st.sampled_from(["releases", "a"]),
        VALUE | st.lists(st.lists(VALUE, min_size=2, max_size=2), max_size=2),
    )
)
def test_any_account_is_read_or_one_line(tmp_path_factory: pytest.TempPathFactory, content: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "privacy.json").write_text(json.dumps(content))
    try:
        Account(folder).spent(1e-5)
    except HoldfastError as error:
        one_line(error, "privacy.json")


# ---- keys and certificates ----


def private(key: Any, form: PrivateFormat = PrivateFormat.OpenSSH) -> bytes:
    return bytes(key.private_bytes(Encoding.PEM, form, NoEncryption()))


RSA, ED = rsa.generate_private_key(65537, 1024), ed25519.Ed25519PrivateKey.generate()
NO_NODE_KEYS = {
    "nothing": b"",
    "not a key": b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n",
    "bytes": b"\xff\0",
    "RSA": private(RSA),
    "Ed25519": private(ED),
    "PEM": private(RSA, PrivateFormat.PKCS8),
    "locked": (
        ec.generate_private_key(ec.SECP384R1()).private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")
        )
    ),
}


@pytest.mark.parametrize("content", NO_NODE_KEYS.values(), ids=NO_NODE_KEYS)
def test_a_node_key_of_another_kind_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        public_of(tmp_path / "key")
    one_line(error.value, "key is not a ", " private key")


def test_a_node_key_of_the_right_kind_is_read(tmp_path: Path) -> None:
    assert make_node_key(tmp_path, "me").startswith(public_of(tmp_path / "key"))


PUBLIC = {
    "RSA": RSA.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH),
    "Ed25519": ED.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH),
    "nothing": b"",
    "no base64": b"ecdsa-sha2-nistp384 ???",
    "cut": b"-----BEGIN PUBLIC KEY-----\nMHY",
    "bytes": b"\xff" * 30,
}


@pytest.mark.parametrize("key", PUBLIC.values(), ids=PUBLIC)
def test_a_public_key_of_another_kind_belongs_to_no_client(key: bytes) -> None:
    with pytest.raises(ConfigError) as error:
        fingerprint_of(key)
    one_line(error.value, "not a public key")
    assert Enrolment().client_of(key) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\0",
        private(RSA, PrivateFormat.PKCS8),
        private(ED, PrivateFormat.PKCS8),
        NO_NODE_KEYS["locked"],
    ],
    ids=["nothing", "bytes", "RSA", "Ed25519", "locked"],
)
def test_an_authority_whose_key_is_of_another_kind_is_one_line(tmp_path: Path, content: bytes) -> None:
    make_authority(tmp_path, "x")
    (tmp_path / "ca.key").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        make_server_certificate(tmp_path, [])
    one_line(error.value, "ca.key")


@pytest.mark.parametrize("read", [expires, hosts_of])
def test_an_invalid_certificate_is_one_line(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    for content in (None, b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"):
        if content is not None:
            (tmp_path / "server.pem").write_bytes(content)
        with pytest.raises(ConfigError) as error:
            read(tmp_path / "server.pem")
        one_line(error.value, "server.pem is not a readable certificate")


def test_a_certificate_that_names_no_hosts_is_one_line(tmp_path: Path) -> None:
    make_authority(tmp_path, "x")
    with pytest.raises(ConfigError, match="ca.pem is not a certificate of a server"):
        hosts_of(tmp_path / "ca.pem")
