"""A new key of the server: signed by the old one, entered into the ledger, and taken over by nodes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from holdfast.core.errors import RunError  # noqa: E402
from holdfast.deploy import server_keys  # noqa: E402
from holdfast.deploy.keys import hosts_of, make_server_key, public_of  # noqa: E402
from holdfast.deploy.ledger import Ledger  # noqa: E402
from holdfast.deploy.ledger_check import LedgerCheck  # noqa: E402
from holdfast.deploy.ledger_keeping import ready_ledger  # noqa: E402
from holdfast.deploy.processes import Processes, free_port  # noqa: E402
from holdfast.deploy.project import Project, init  # noqa: E402
from holdfast.deploy.server_keys import links_of, replace_server_key, successor  # noqa: E402
from holdfast.deploy.server_memory import ServerMemory  # noqa: E402
from holdfast.deploy.signed_head import read_signed_head  # noqa: E402
from tests.deploy.keyed_world import World  # noqa: E402

Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return init(tmp_path / "ward", 2, ["fl.example.org"], port=free_port())


def good(project: Project, head: Path | None = None) -> bool:
    check = LedgerCheck(project.ledger_file, project.run)
    return all(one.good for one in check.examine(None if head is None else str(head)))


def test_rotate_replaces_the_servers_keys_and_old_heads_stay_valid(
    project: Project, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = shutil.copy(project.server / "ledger.head", tmp_path / "kept")
    before = {name: (project.server / name).read_bytes() for name in ("orders.key", "server.key", "ca.key")}
    hosts = hosts_of(project.server / "server.pem")
    with monkeypatch.context() as patch:
        patch.setattr(Processes, "alive", lambda self: [1])
        assert ask("rotate", project.path)[0] == 2  # it is running
    assert ask("rotate", project.path, "--reason", "yearly")[0] == 0
    after = {name: (project.server / name).read_bytes() for name in before}
    assert [after[name] == before[name] for name in before] == [False, False, True]
    assert hosts_of(project.server / "server.pem") == hosts and good(project, kept)
    assert (project.server / "orders.key").stat().st_mode & 0o077 == 0
    assert (project.node(1) / "server.pub").read_text() == project.server_public.read_text()
    entry = project.ledger().of("server-key")[-1]
    assert entry.what["reason"] == "yearly"
    assert not [file for file in project.server.iterdir() if "next" in file.name or "renewing" in file.name]
    signed = read_signed_head(project.server / "ledger.head")
    assert signed is not None and len(signed.keys) == 1 and signed.head == project.ledger().head


def test_a_head_that_the_old_key_signed_for_a_later_ledger_is_refused(
    project: Project, tmp_path: Path
) -> None:
    """A key that was replaced, perhaps because it was stolen, signs nothing any more."""
    stolen = tmp_path / "stolen"
    shutil.copytree(project.server, stolen)
    replace_server_key(project.ledger(), "stolen")
    assert good(project)
    thief = Ledger(stolen / "ledger.jsonl")
    thief.append("ban", 0, reason="x", by="thief")
    thief.append("ban", 1, reason="x", by="thief")
    thief.sign()
    (check,) = [
        one
        for one in LedgerCheck(project.ledger_file, project.run).examine(str(stolen / "ledger.head"))
        if not one.good
    ]
    assert check.what == "given head" and "not signed by the key" in check.said


class Kill(BaseException):
    """A process that is killed: nothing after it is done."""


@pytest.mark.parametrize(
    "point", ["before the entry", "before the file", "before the public half", "unsigned"]
)
def test_a_kill_while_the_key_is_replaced_leaves_one_that_holds(
    point: str, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = public_of(project.server / "orders.key")

    def killed(*_: Any, **__: Any) -> None:
        raise Kill

    owner, name = {
        "before the entry": (Ledger, "append"),
        "before the file": (server_keys.os, "replace"),
        "before the public half": (server_keys, "write_atomically"),
        "unsigned": (Ledger, "sign"),
    }[point]
    with monkeypatch.context() as patch, pytest.raises(Kill):
        patch.setattr(owner, name, killed)
        replace_server_key(project.ledger(), "yearly")
    ledger = ready_ledger(project.ledger_file, project.run)
    now = public_of(project.server / "orders.key")
    assert (now == old) == (point == "before the entry") and good(project)
    assert ledger.of("server-key")[-1].what["key"].startswith(now)
    assert project.server_public.read_text().startswith(now)
    assert not (project.server / server_keys.NEXT_KEY).exists()
    replace_server_key(ledger, "again")
    assert good(project)


def test_a_key_is_followed_over_the_last_changes_only(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    keys = [make_server_key(tmp_path)]
    ledger.append("server-key", key=keys[0])
    for _ in range(server_keys.LINKS + 1):
        keys.append(replace_server_key(ledger, "x"))
    links = links_of(ledger.entries)
    assert len(links) == server_keys.LINKS and successor(keys[1], links) == keys[-1]
    assert successor(keys[0], links) == keys[0]  # it has missed too many
    assert os.path.getsize(tmp_path / "ledger.head") < 4096  # what an order may carry
    ledger.append("server-key", key=keys[2])  # after a loss: nothing leads to it
    assert links_of(ledger.entries) == []


def test_nodes_go_on_with_a_server_whose_key_was_replaced(tmp_path: Path) -> None:
    world = World(tmp_path, rounds=2)
    ledger = ready_ledger(world.ledger.path, world.out)
    old = world.server
    replace_server_key(ledger, "yearly")
    world.ledger = Ledger(world.ledger.path)
    world.run()
    assert [entry.what["took_part"] for entry in world.ledger.of("round")] == [[0, 1, 2]] * 2
    new = (tmp_path / "orders.pub").read_text()
    assert new != old and all((home / "server.pub").read_text() == new for home in world.homes[:3])


def test_nodes_refuse_a_server_that_was_restored_from_an_older_copy(tmp_path: Path) -> None:
    """Nothing is trained for it until the owners of the nodes accept it, and the server says why."""
    world = World(tmp_path, rounds=1)
    ready_ledger(world.ledger.path, world.out)
    saved = {name: (tmp_path / name).read_bytes() for name in ("ledger.jsonl", "ledger.head")}
    world.run()
    states = [context.node_config["state-dir"] for context in list(world.grid.nodes.values())[:3]]
    shutil.rmtree(world.out)
    for name, content in saved.items():
        (tmp_path / name).write_bytes(content)
    world.ledger = Ledger(world.ledger.path)
    with pytest.raises(RunError, match="no client answered.*the server lost rounds"):
        world.run(attempt=2)
    for state in states:
        assert "lost rounds" in ServerMemory(Path(str(state))).refused()
        ServerMemory(Path(str(state))).accept("the disk failed")
    world.ledger = Ledger(world.ledger.path)
    world.run(attempt=3)
    assert world.ledger.of("round")[-1].what["took_part"] == [0, 1, 2]
