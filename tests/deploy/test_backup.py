"""Backups of a server, and restored servers that are older than their nodes."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from holdfast.core.errors import ConfigError, RunError  # noqa: E402
from holdfast.deploy import backup as backup_module  # noqa: E402
from holdfast.deploy.backup import restore_backup, write_backup  # noqa: E402
from holdfast.deploy.ledger_check import LedgerCheck  # noqa: E402
from holdfast.deploy.processes import free_port  # noqa: E402
from holdfast.deploy.project import Project, init, open_project  # noqa: E402
from holdfast.storage.store import Store  # noqa: E402
from tests.deploy.keyed_world import World, spoil  # noqa: E402

Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation after a run of two rounds in which client 1 was banned."""
    project = init(tmp_path_factory.mktemp("played") / "ward", 3, port=free_port(), node_keys=False)
    world = World(project.server, rounds=2, strikes=1)
    world.run(spoil(1))
    world.out.rename(project.run)
    return project.path


@pytest.fixture
def project(played: Path, tmp_path: Path) -> Project:
    shutil.copytree(played, tmp_path / "ward")
    return open_project(tmp_path / "ward")


def test_a_restored_server_is_the_one_that_was_backed_up(project: Project, tmp_path: Path, ask: Ask) -> None:
    code, out, _ = ask("backup", project.path, tmp_path / "b.tar")
    assert code == 0 and "round 2" in out and (tmp_path / "b.tar").stat().st_mode & 0o077 == 0
    with tarfile.open(tmp_path / "b.tar") as tar:
        names = {Path(name).parts[:2] for name in tar.getnames()}
    assert ("server", "orders.key") in names and not {("server", "logs"), ("nodes", "0")} & names
    (project.path / "nodes").mkdir(exist_ok=True)
    assert ask("restore", tmp_path / "b.tar", project.path)[0] == 2  # there is a server
    code, out, _ = ask("restore", tmp_path / "b.tar", tmp_path / "new")
    restored = open_project(tmp_path / "new")
    assert code == 0 and restored.ledger().head == project.ledger().head
    assert all(check.good for check in LedgerCheck(restored.ledger_file, restored.run).examine())
    for name in ("head.json", "result.json", Store(project.run).state_file(2)):
        assert (restored.run / name).read_bytes() == (project.run / name).read_bytes()
    assert (restored.server / "ca.key").stat().st_mode & 0o077 == 0
    assert ask("ban", restored.path, 0)[0] == 0  # it works


def remember(project: Project, client: int = 0) -> None:
    """The node of this client, whose folder is here, has seen the ledger as it is."""
    home = project.node(client)
    (home / "state").mkdir(parents=True, exist_ok=True)
    (home / "node.toml").write_text(f"client = {client}\n")
    shutil.copy(project.server / "ledger.head", home / "state" / "ledger.head")


def test_a_backup_that_is_older_than_a_node_is_restored_only_when_the_loss_is_accepted(
    project: Project, tmp_path: Path, ask: Ask
) -> None:
    write_backup(project, tmp_path / "b.tar")
    ledger = project.ledger()
    ledger.append("ban", 0, reason="later", by="operator")
    ledger.sign()
    remember(project)
    shutil.rmtree(project.server)
    (project.path / "federation.toml").unlink()
    code, _, err = ask("restore", tmp_path / "b.tar", project.path)
    assert code == 2 and len(err.splitlines()) == 1 and "is older than its nodes" in err
    assert f"client 0 has seen {len(ledger.entries)} entries" in err
    assert not project.server.exists() and project.node(0).exists()  # nothing is half restored
    code, out, err = ask("restore", tmp_path / "b.tar", project.path, "--accept-loss", "the disk failed")
    assert code == 0 and "accept-loss NODE" in err
    restored = open_project(project.path)
    (reset,) = restored.ledger().of("reset")
    assert reset.what["reason"] == "the disk failed" and reset.what["lost"] == [
        {"entries": len(ledger.entries), "head": ledger.head}
    ]
    assert all(check.good for check in LedgerCheck(restored.ledger_file, restored.run).examine())
    code, out, _ = ask("verify", restored.path, "--head", ledger.head)
    assert code == 1 and "the operator has accepted that" in out


def test_a_head_that_others_have_kept_shows_that_a_backup_is_old(
    project: Project, tmp_path: Path, ask: Ask
) -> None:
    write_backup(project, tmp_path / "b.tar")
    assert ask("ban", project.path, 0)[0] == ask("head", project.path, "--publish", tmp_path / "h")[0] == 0
    code, _, err = ask("restore", tmp_path / "b.tar", tmp_path / "new", "--head", tmp_path / "h")
    assert code == 2 and f"{tmp_path / 'h'} has seen" in err and not (tmp_path / "new" / "server").exists()
    (tmp_path / "no").write_text("[]")
    assert ask("restore", tmp_path / "b.tar", tmp_path / "new", "--head", tmp_path / "no")[0] == 2


def altered(file: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """A backup whose files were changed."""
    with tarfile.open(file) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    change(files)
    with tarfile.open(file.with_name("altered.tar"), "w") as tar:
        for name, content in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    return file.with_name("altered.tar")


def garble(files: dict[str, bytes]) -> None:
    files["server/run/head.json"] += b" "


def leave_out(files: dict[str, bytes]) -> None:
    del files["server/ca.pem"]


def add(files: dict[str, bytes]) -> None:
    files["server/extra"] = b""


def climb(files: dict[str, bytes]) -> None:
    index = json.loads(files["backup.json"])
    index["files"]["../outside"] = "0"
    files["backup.json"] = json.dumps(index).encode()
    files["../outside"] = b""


def no_index(files: dict[str, bytes]) -> None:
    del files["backup.json"]


@pytest.mark.parametrize("change", [garble, leave_out, add, climb, no_index])
def test_a_backup_that_was_changed_is_refused_and_leaves_nothing(
    project: Project, tmp_path: Path, change: Callable[[dict[str, bytes]], None]
) -> None:
    write_backup(project, tmp_path / "b.tar")
    with pytest.raises(RunError, match="is not a whole backup"):
        restore_backup(altered(tmp_path / "b.tar", change), tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == [] and not (tmp_path / "outside").exists()
    (tmp_path / "b.tar").write_bytes((tmp_path / "b.tar").read_bytes()[:5000])
    with pytest.raises(RunError, match="is not a whole backup"):
        restore_backup(tmp_path / "b.tar", tmp_path / "new")
    with pytest.raises(ConfigError, match="exists already"):
        write_backup(project, tmp_path / "b.tar")


def test_a_run_that_commits_meanwhile_is_copied_again(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, copies = shutil.copytree, []

    def copytree(source: Path, *args: object, **given: object) -> object:
        done = plain(source, *args, **given)  # type: ignore[arg-type]
        copies.extend([done] if Path(source) == project.run else [])
        if len(copies) == 1 and Path(source) == project.run:
            (project.run / "head.json").write_text((project.run / "head.json").read_text() + " ")
        return done

    monkeypatch.setattr(backup_module.shutil, "copytree", copytree)
    write_backup(project, tmp_path / "b.tar")
    assert len(copies) == 2
