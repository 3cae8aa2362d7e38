"""A node's new key: it is taken when the server refuses the old one, and not before."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from holdfast.core.errors import ConfigError  # noqa: E402
from holdfast.deploy.keys import make_node_key, public_of  # noqa: E402
from holdfast.deploy.pending_key import make_pending_key, take_other_key, was_refused  # noqa: E402


def public(folder: Path) -> str:
    """Of the key in use; its file says the same."""
    found = public_of(folder / "key")
    assert (folder / "key.pub").read_text().startswith(found)
    assert (folder / "key").stat().st_mode & 0o077 == 0
    return found


def test_the_new_key_is_taken_and_the_old_one_again_if_both_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no key yet"):
        make_pending_key(tmp_path, 3)
    make_node_key(tmp_path, "client-3")
    old = public(tmp_path)
    assert not take_other_key(tmp_path, 3)  # there is none
    new = make_pending_key(tmp_path, 3)
    assert new.endswith(" client-3") and (tmp_path / "key.new.pub").read_text().strip() == new
    assert public(tmp_path) == old
    with pytest.raises(ConfigError, match="is not enrolled yet"):
        make_pending_key(tmp_path, 3)
    for expected in (new, old, new):
        assert take_other_key(tmp_path, 3) and expected.startswith(public(tmp_path))
    assert not (tmp_path / "key.new").exists() and not (tmp_path / "key.swapping").exists()
    make_pending_key(tmp_path, 3)  # the next change


def test_only_a_refused_key_is_replaced(tmp_path: Path) -> None:
    log = tmp_path / "node3.log"
    assert not was_refused(log)
    log.write_text("starting\nlost the connection\n")
    assert not was_refused(log)
    log.write_text("x\n" * 1000 + "SuperNode activation failed [code: 2004]\nstopped\n")
    assert was_refused(log)
    assert not was_refused(log, since=log.stat().st_size)  # of an earlier start
