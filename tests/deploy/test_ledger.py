"""The ledger and who is who."""

from __future__ import annotations

import hashlib
import json
import os
from multiprocessing import get_context
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="enrolment needs cryptography: pip install 'holdfast[flower]'")


from holdfast.core.errors import ConfigError, RunError, StoreError  # noqa: E402
from holdfast.deploy.enrolment import Enrolment, fingerprint_of  # noqa: E402
from holdfast.deploy.ledger import Ledger  # noqa: E402
from tests.deploy.node_keys import a_key  # noqa: E402


def test_lines_are_chained_and_read_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.jsonl")
    assert ledger.head == "0" * 64 and ledger.entries == []
    ledger.append("ban", client=3, round=7, reason="norm 12", by="method", worst=float("nan"))
    ledger.append("finish")
    lines = (tmp_path / "l.jsonl").read_bytes().splitlines(keepends=True)
    assert json.loads(lines[1])["before"] == hashlib.sha256(lines[0]).hexdigest()
    assert ledger.head == hashlib.sha256(lines[1]).hexdigest()
    again = Ledger(tmp_path / "l.jsonl")
    assert again.entries == ledger.entries and again.head == ledger.head
    assert again.of("ban")[0].what == {"reason": "norm 12", "by": "method", "worst": None}
    assert os.stat(tmp_path / "l.jsonl").st_mode & 0o077 == 0


@pytest.mark.parametrize("harm", ["change", "take out", "put in", "swap", "garbage"])
def test_a_changed_ledger_is_noticed(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "l.jsonl"
    ledger = Ledger(path)
    for client in range(4):
        ledger.append("strike", client=client, reason="x")
    lines = path.read_bytes().splitlines(keepends=True)
    if harm == "change":
        lines[1] = lines[1].replace(b'"client":1', b'"client":2')
    elif harm == "take out":
        del lines[1]
    elif harm == "put in":
        lines.insert(1, lines[1])
    elif harm == "swap":
        lines[1], lines[2] = lines[2], lines[1]
    else:
        lines[1] = b"[]\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(RunError, match="is damaged: line [23]"):
        Ledger(path)


def test_a_torn_last_line_is_cut_off_and_a_shorter_file_is_not_forgiven(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    Ledger(path).append("start")
    with open(path, "ab") as file:
        file.write(b'{"number":1,"kind":"ba')  # the writer was killed here
    ledger = Ledger(path)
    assert len(ledger.entries) == 1
    ledger.append("resume")
    assert [entry.kind for entry in Ledger(path).entries] == ["start", "resume"]
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(RunError, match="has become shorter"):
        ledger.refresh()


def test_a_line_is_on_the_disk_before_anybody_goes_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the file's name, when it is new."""
    path, fsync, synced = tmp_path / "l.jsonl", os.fsync, []

    def noted(handle: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{handle}"), path.read_bytes().count(b"\n")))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    ledger = Ledger(path)
    for number in (1, 2):
        ledger.append("ban", client=number, reason="norm")
        assert synced[-1] == (str(path), number), "the whole line was written before the wait"
    assert synced[0][0] == str(tmp_path)


def test_a_full_disk_is_reported_and_leaves_the_ledger_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, write = Ledger(tmp_path / "l.jsonl"), os.pwrite
    ledger.append("start")
    monkeypatch.setattr(os, "pwrite", lambda file, line, place: write(file, line[:10], place))
    with pytest.raises(StoreError, match="the disk is full"):
        ledger.append("ban", client=1, reason="norm")
    monkeypatch.undo()
    ledger.append("ban", client=1, reason="norm")
    assert [entry.kind for entry in Ledger(tmp_path / "l.jsonl").entries] == ["start", "ban"]


def _write_many(path: Path, name: str) -> None:
    ledger = Ledger(path)
    for _ in range(20):
        ledger.append("strike", client=0, reason=name)


def test_several_processes_may_append(tmp_path: Path) -> None:
    path, context = tmp_path / "l.jsonl", get_context("fork")
    reader = Ledger(path)
    writers = [context.Process(target=_write_many, args=(path, name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert sorted(entry.what["reason"] for entry in reader.refresh()) == ["a"] * 20 + ["b"] * 20
    assert [entry.number for entry in reader.entries] == list(range(40)) and reader.refresh() == []


def test_a_client_is_its_key_and_a_new_key_is_no_new_start(tmp_path: Path) -> None:
    ledger, (old, old_pem), (new, _), (other, _) = Ledger(tmp_path / "l"), a_key(), a_key(), a_key()
    assert fingerprint_of(old) == fingerprint_of(old_pem)
    ledger.append("enrol", client=0, key=old)
    ledger.append("enrol", client=1, key=other)
    ledger.append("strike", client=0, round=2, reason="NaN")
    who = Enrolment.of(ledger.entries)
    assert (
        who.client_of(old_pem) == 0
        and who.client_of(new) is None
        and who.client_of(b"nonsense") is None
        and who.admitted == {0, 1}
    )
    ledger.append("rotate", client=0, key=new)
    ledger.append("ban", client=0, round=3, reason="norm", by="method")
    ledger.append("ban", client=0, round=4, reason="again", by="operator")
    who = Enrolment.of(ledger.entries)
    assert who.client_of(old_pem) is None and who.client_of(new) == 0
    assert who.banned == {0: "norm"} and who.admitted == {1} and who.members[0].strikes == ["NaN"]
    ledger.append("rotate", client=0, key=a_key()[0])
    assert Enrolment.of(ledger.entries).banned == {0: "norm"}
    ledger.append("unban", client=0, reason="it was our fault", by="operator")
    ledger.append("leave", client=1)
    who = Enrolment.of(ledger.entries)
    assert who.banned == {} and who.members[0].strikes == [] and who.admitted == {0}


def test_a_key_cannot_be_enrolled_for_another_client(tmp_path: Path) -> None:
    ledger, (first, _), (second, _) = Ledger(tmp_path / "l"), a_key(), a_key()
    ledger.append("enrol", client=0, key=first)
    ledger.append("rotate", client=0, key=second)
    who = Enrolment.of(ledger.entries)
    for key in (first, second):
        with pytest.raises(ConfigError, match="belongs or belonged to client 0"):
            who.check_new(1, key)
    with pytest.raises(ConfigError, match="belongs or belonged to client 0"):
        who.check_new(0, first)  # an old key is not taken up again
    assert who.check_new(0, second) == fingerprint_of(second)
    with pytest.raises(ConfigError, match="not a public key"):
        who.check_new(1, "ssh-rsa nonsense")
