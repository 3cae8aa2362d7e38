"""benchmarks/record.py: the commands of docs/reproduction.md are valid."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks import record
from holdfast.cli import main


@pytest.mark.parametrize("command", record.commands(record.PAGE.read_text()))
def test_every_command_of_the_page_is_valid(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([*shlex.split(command)[1:], "--dry-run"])
    assert not left.value.code and re.search(
        r"\d experiments? of \d+( or \d+)* rounds", capsys.readouterr().out
    )


def test_commands_are_found_once_and_across_lines() -> None:
    page = (
        "`holdfast reproduce a I --scale full` and `holdfast run x`\n(`holdfast reproduce b II\n--set"
        " 'x=[1,2]'`)"
    )
    page += ", `holdfast reproduce a I --scale full`"
    known = record.commands(page)
    assert known == ["holdfast reproduce a I --scale full", "holdfast reproduce b II --set 'x=[1,2]'"]
    assert record.chosen(["1", "a I", "reproduce"], known) == [1, 0]
    for wrong in ("2", "c III"):
        with pytest.raises(SystemExit, match="there is no command"):
            record.chosen([wrong], known)


@pytest.mark.slow
def test_chosen_commands_run_and_failures_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`holdfast reproduce fedcap III --scale smoke --only attack=SF` `holdfast reproduce fedcap nothing`"
    )
    monkeypatch.setattr(record, "PAGE", page)
    monkeypatch.setattr(
        sys, "argv", ["record.py", "0", "1", "--at-once", "2", "--out", str(tmp_path / "out")]
    )
    with pytest.raises(SystemExit) as left:
        record.main()
    said = capsys.readouterr().out
    assert (
        left.value.code == 1
        and "00-fedcap-III: done after" in said
        and "01-fedcap-nothing: failed (2), see " in said
    )
    assert (tmp_path / "out" / "00-fedcap-III" / "report.html").exists()
    assert "nothing" in (tmp_path / "out" / "01-fedcap-nothing.log").read_text()
