"""Which keys the SuperLink has: those of banned clients stay, so that they can come back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from holdfast.core.errors import RunError  # noqa: E402
from holdfast.deploy.enrolment import Enrolment, fingerprint_of  # noqa: E402
from holdfast.deploy.ledger import Ledger  # noqa: E402
from holdfast.deploy.registered import RegisteredKeys, gone_for_good  # noqa: E402
from tests.deploy.node_keys import a_key  # noqa: E402


class SuperLink:
    """Takes no key twice."""

    def __init__(self) -> None:
        self.nodes: dict[str, str] = {}
        self.keys: set[str] = set()
        self.calls = 0

    def register(self, key: str, known: set[str]) -> str:
        assert key not in self.keys
        self.calls += 1
        self.keys.add(key)
        self.nodes[str(100 + len(self.keys))] = key
        return str(100 + len(self.keys))

    def unregister(self, node: str) -> None:
        self.calls += 1
        del self.nodes[node]


@pytest.fixture
def link() -> SuperLink:
    return SuperLink()


def follow(ledger: Ledger, link: SuperLink) -> dict[str, str]:
    """The keys that the proxy admits."""
    folder = ledger.path.parent
    RegisteredKeys(folder, link.register, link.unregister).follow(Enrolment.of(ledger.entries))
    return {name: node for name, node in json.loads((folder / "registered.json").read_text()).items() if node}


def test_a_ban_keeps_the_key_at_the_superlink_and_unban_brings_it_back(
    tmp_path: Path, link: SuperLink
) -> None:
    ledger, key = Ledger(tmp_path / "ledger.jsonl"), a_key()[0]
    name = fingerprint_of(key)
    ledger.append("enrol", 0, key=key)
    assert follow(ledger, link) == {name: "101"}
    for _ in range(2):
        ledger.append("ban", 0, reason="x", by="operator")
        assert follow(ledger, link) == {} and link.nodes == {"101": key}
        assert not gone_for_good(tmp_path, name)
        ledger.append("unban", 0, reason="y", by="operator")
        assert follow(ledger, link) == {name: "101"}
    assert link.calls == 1


def test_the_key_of_a_client_that_leaves_or_is_replaced_goes_for_good(
    tmp_path: Path, link: SuperLink
) -> None:
    """Also if it was banned meanwhile."""
    ledger, keys = Ledger(tmp_path / "ledger.jsonl"), [a_key()[0] for _ in range(3)]
    ledger.append("enrol", 0, key=keys[0])
    ledger.append("enrol", 1, key=keys[1])
    follow(ledger, link)
    ledger.append("ban", 0, reason="x", by="operator")
    follow(ledger, link)
    ledger.append("rotate", 0, key=keys[2])
    ledger.append("leave", 1)
    assert follow(ledger, link) == {} and link.nodes == {}
    assert gone_for_good(tmp_path, fingerprint_of(keys[0]))
    ledger.append("unban", 0, reason="y", by="operator")
    assert follow(ledger, link).keys() == {fingerprint_of(keys[2])} and list(link.nodes.values()) == [keys[2]]


def test_a_stop_between_the_two_files_loses_no_key(
    tmp_path: Path, link: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, key = Ledger(tmp_path / "ledger.jsonl"), a_key()[0]
    ledger.append("enrol", 0, key=key)
    follow(ledger, link)
    from holdfast.deploy import registered

    plain, name = registered.write_json, fingerprint_of(key)

    def stopped(file: Path, content: dict[str, str]) -> None:
        plain(file, content)
        raise KeyboardInterrupt

    for kind, admitted in (("ban", {}), ("unban", {name: "101"})):
        ledger.append(kind, 0, reason="x", by="operator")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(registered, "write_json", stopped)
            follow(ledger, link)
        assert follow(ledger, link) == admitted and link.nodes == {"101": key}
    (tmp_path / "suspended.json").write_text('{"x": 1}')
    with pytest.raises(RunError, match="suspended.json is damaged"):
        follow(ledger, link)
