"""The keys that sign, and what a signature is worth."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="keys need cryptography: pip install 'holdfast[flower]'")

from holdfast.core.errors import ConfigError  # noqa: E402
from holdfast.deploy.keys import (
    load_private,
    make_node_key,
    make_server_key,
    public_of,
    sign,
    verify,
)  # noqa: E402


def test_the_server_has_a_key_that_only_its_owner_reads_and_that_is_kept(tmp_path: Path) -> None:
    public = make_server_key(tmp_path)
    assert (tmp_path / "orders.key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "orders.pub").unlink()
    assert make_server_key(tmp_path) == public and (tmp_path / "orders.pub").read_text() == public + "\n"


def test_a_signature_is_of_one_key_one_kind_and_one_message(tmp_path: Path) -> None:
    public, other = make_server_key(tmp_path), make_node_key(tmp_path, "client-0")
    signature = sign(load_private(tmp_path / "orders.key"), "order", b"train")
    assert verify(public, "order", b"train", signature) and verify(
        public_of(tmp_path / "orders.key"), "order", b"train", signature
    )
    assert not verify(other, "order", b"train", signature) and verify(
        other, "x", b"", sign(load_private(tmp_path / "key"), "x", b"")
    )
    assert not verify(public, "reply", b"train", signature) and not verify(
        public, "order", b"train!", signature
    )
    assert not verify(public, "order\ntrain", b"", signature), "the first line ends where the message begins"
    for harm in (b"", b"\0" * 300, signature[:-1], signature + b"\0"):
        assert not verify(public, "order", b"train", harm)
    for nobody in ("", "nonsense", "ssh-ed25519 AAAA", "-----BEGIN PUBLIC KEY-----\n", "\ud800"):
        assert not verify(nobody, "order", b"train", signature)
    with pytest.raises(ValueError, match="one line"):
        sign(load_private(tmp_path / "key"), "a\nb", b"")
    with pytest.raises(ConfigError, match="not a readable private key"):
        load_private(tmp_path / "key.pub")
