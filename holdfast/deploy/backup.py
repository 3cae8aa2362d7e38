"""Backups of a federation's server: one tar file with all that a new machine needs to continue, checked when
it is written and again when it is restored.

It holds the settings, the experiment, plug-ins, keys, the ledger with its signed head, and the run; no
logs, no database of Flower (it is made anew) and no folders of nodes: those belong to the nodes. It may be
made while the federation runs: heads are copied before the ledger, which only ever follows them. A backup has
the server's private keys, so it is readable by its owner only and belongs where they may be."""

from __future__ import annotations

import datetime
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, RunError
from holdfast.core.files import as_json
from holdfast.core.reading import digest_of_file, is_whole, parse_json, read_whole
from holdfast.core.version import __version__
from holdfast.deploy.ledger_check import LedgerCheck
from holdfast.deploy.project import Project, open_project
from holdfast.deploy.server_memory import ServerMemory, ShownHead

_FORMAT = 1
_INDEX = "backup.json"
_TRIES = 10  # copies of a run that commits a round meanwhile
_INDEX_SIZE = 1 << 26
_SERVER = (  # of server/, beside the run
    "ca.key",
    "ca.pem",
    "server.key",
    "server.pem",
    "superexec.secret",
    "orders.key",
    "orders.pub",
    "refusals.jsonl",
    "traffic.json",
    "ledger.head",
    "ledger.jsonl",  # the last: it only grows
)
_LEFT_OUT = ("lock", "*.writing")  # of the run: its lock, and files that are just being written


@dataclass(frozen=True)
class Backup:
    """What a backup says of itself."""

    at: str
    name: str
    entries: int
    head: str
    round: int
    files: dict[str, str]
    """SHA-256 by path."""


def write_backup(project: Project, out: Path) -> Backup:
    """Write a backup of a server; what was copied is checked like a ledger and a run before it counts."""
    if out.exists():
        raise ConfigError(f"{out} exists already; choose another name")
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=_parent(out)) as folder:
        copy = Path(folder) / "copy"
        _copy(project, copy)
        ledger = LedgerCheck(copy / "server" / "ledger.jsonl", copy / "server" / "run").require()
        found = open_project(copy)
        at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        files = {str(file.relative_to(copy)): digest_of_file(file) for file in _files(copy)}
        backup = Backup(at, project.settings.name, len(ledger.entries), ledger.head, _round(found), files)
        index = as_json({"format": _FORMAT, "holdfast": __version__, **vars(backup)})
        whole = Path(folder) / "whole.tar"
        with open(os.open(whole, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                about = tarfile.TarInfo(_INDEX)
                about.size, about.mode = len(index), 0o600
                tar.addfile(about, io.BytesIO(index))
                for name in files:
                    tar.add(copy / name, arcname=name, recursive=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(whole, out)
    return backup


def restore_backup(file: Path, folder: Path) -> tuple[Project, Backup]:
    """Write the server of a backup into a folder that has none; its nodes may be there. Nothing is left when
    the backup is damaged. It is not started, and not compared with the nodes (see `newer_nodes`)."""
    folder = Path(folder).absolute()
    if (folder / "server").exists() or (folder / "federation.toml").exists():
        raise ConfigError(f"{folder} has a server already; move its server/ and federation.toml away first")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".restoring-", dir=folder) as new:
        backup = _unpack(file, Path(new))
        check = LedgerCheck(Path(new) / "server" / "ledger.jsonl", Path(new) / "server" / "run")
        ledger = check.require()
        if (len(ledger.entries), ledger.head) != (backup.entries, backup.head):
            raise RunError(f"{file} is damaged: its ledger is not the one that its index names")
        for part in sorted(Path(new).iterdir(), key=lambda part: part.name == "federation.toml"):
            os.replace(part, folder / part.name)  # the file that makes it a federation comes last
    return open_project(folder), backup


def remove_restored(project: Project, backup: Backup) -> None:
    """Remove what `restore_backup` has written; nodes stay."""
    for name in {Path(file).parts[0] for file in backup.files}:
        part = project.path / name
        shutil.rmtree(part) if part.is_dir() else part.unlink()


def newer_nodes(project: Project, heads: list[Path]) -> dict[str, ShownHead]:
    """Return who has seen more of this federation's ledger than the server has: nodes whose folders are here,
    and files with heads that nodes or others have kept."""
    ledger, out = project.ledger(), {}
    kept = {
        f"client {file.parent.name}": ServerMemory(file.parent / "state").kept()
        for file in sorted(project.path.glob("nodes/*/node.toml"))
    }
    for file in heads:
        try:
            kept[str(file)] = ShownHead.parse(read_whole(file, 1 << 16).decode())
        except (OSError, ValueError) as error:
            raise ConfigError(f"--head: {file} cannot be read: {error}") from None
        if kept[str(file)] is None:
            raise ConfigError(f"--head: {file} is not a signed head of a ledger")
    for who, head in kept.items():
        if head is not None and not ledger.had(head.entries, head.head):
            out[who] = head
    return out


def accept_older_server(project: Project, newer: dict[str, ShownHead], reason: str) -> str:
    """Enter into the ledger that rounds are lost, with the heads that it does not have any more. Return the
    new head."""
    ledger = project.ready_ledger()
    check = LedgerCheck(project.ledger_file, project.run)
    lost = sorted({(head.entries, head.head) for head in newer.values()})
    what: dict[str, Any] = {
        "reason": reason,
        "by": "operator",
        "lost": [{"entries": n, "head": head} for n, head in lost],
    }
    if check.head is not None:
        what |= {"run": check.run, "model": check.store.digest(check.head.round)}
    ledger.append("reset", None, None if check.head is None else check.head.round, **what)
    ledger.sign()
    return ledger.head


def _parent(out: Path) -> Path:
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out}: there is no folder {out.parent}")
    return out.absolute().parent


def _copy(project: Project, copy: Path) -> None:
    """Copy all between two commits: the run's head file must be the same before and after, else the ledger
    may have a round that the copied run has not."""
    for _ in range(_TRIES):
        before = _bytes(project.run / "head.json")
        try:
            _copy_once(project, copy)
        except (shutil.Error, OSError):  # a file that a commit removed meanwhile
            if _bytes(project.run / "head.json") == before:
                raise
        if _bytes(project.run / "head.json") == before == _bytes(copy / "server" / "run" / "head.json"):
            return
        shutil.rmtree(copy, ignore_errors=True)
    raise RunError("the run commits rounds faster than it can be copied; stop the federation first")


def _copy_once(project: Project, copy: Path) -> None:
    for folder in (copy, copy / "server"):
        folder.mkdir(mode=0o700)
    for file in (project.path / "federation.toml", project.experiment, *project.plugins):
        shutil.copy2(file, copy / file.relative_to(project.path))
    for name in ("README.md", ".gitignore"):
        if (project.path / name).exists():
            shutil.copy2(project.path / name, copy / name)
    if project.run.exists():
        shutil.copytree(project.run, copy / "server" / "run", ignore=shutil.ignore_patterns(*_LEFT_OUT))
    for name in _SERVER:
        if (project.server / name).exists():
            shutil.copy2(project.server / name, copy / "server" / name)


def _bytes(file: Path) -> bytes | None:
    return read_whole(file) if file.exists() else None


def _round(project: Project) -> int:
    head = LedgerCheck(project.ledger_file, project.run).head
    return 0 if head is None else head.round


def _files(folder: Path) -> Iterator[Path]:
    return (file for file in sorted(folder.rglob("*")) if file.is_file())


def _unpack(file: Path, into: Path) -> Backup:
    """Write the files that the index names, and nothing else; check the SHA-256 of each."""
    try:
        with tarfile.open(file, "r:") as tar:
            first = tar.next()
            if first is None or first.name != _INDEX or not first.isreg() or first.size > _INDEX_SIZE:
                raise ValueError("it has no index")
            backup = _index(_content(tar, first).read())
            left = set(backup.files)
            while (member := tar.next()) is not None:
                if not member.isreg() or member.name not in left:
                    raise ValueError(f"it holds {member.name[:80]!r}, which its index does not name")
                left.remove(member.name)
                target = into / member.name
                target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                with open(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as out:
                    shutil.copyfileobj(_content(tar, member), out)
                    out.flush()
                    os.fsync(out.fileno())
                if digest_of_file(target) != backup.files[member.name]:
                    raise ValueError(f"{member.name} is not what its index names")
            if left:
                raise ValueError(f"{sorted(left)[0]} is missing")
    except (OSError, ValueError, tarfile.TarError, EOFError) as error:
        raise RunError(f"{file} is not a whole backup: {' '.join(str(error).split())[:200]}") from None
    return backup


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> io.BufferedReader:
    content = tar.extractfile(member)
    if content is None:
        raise ValueError(f"{member.name[:80]!r} is not a file")
    return content  # type: ignore[return-value]


def _index(content: bytes) -> Backup:
    table = parse_json(content)
    if not isinstance(table, dict) or table.get("format") != _FORMAT:
        raise ValueError("its index cannot be read by this version of Holdfast")
    files = table.get("files")
    if not isinstance(files, dict):
        raise ValueError("its index names no files")
    names = list(files)
    parts = [Path(name).parts for name in names]
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in names) or () in parts:
        raise ValueError("its index names files outside of the federation")
    if not {"federation.toml", "experiment.toml", "server/ledger.jsonl"} <= set(names):
        raise ValueError("its index names no ledger, no settings or no experiment")
    texts = [table.get(name) for name in ("at", "name", "head")] + list(files.values())
    if not all(isinstance(text, str) for text in texts) or not all(
        is_whole(table.get(name)) for name in ("entries", "round")
    ):
        raise ValueError("its index cannot be read")
    return Backup(table["at"], table["name"], table["entries"], table["head"], table["round"], files)
