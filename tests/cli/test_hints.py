"""Commands that the command line prints can be pasted and work; wrong input has one line that says what to
do."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

import holdfast
from holdfast.cli import app, main
from tests.cli.commands import Answer, refused

CONFIG = """
[data]
clients = 4
partition = { name = "pathological", samples_per_client = 24 }
[model]
name = "mlp"
hidden = 8
[train]
rounds = 1
local_epochs = 1
[engine]
plan = "loop"
threads = 1
"""
SWEEP = '[sweep]\n"method.name" = ["fedavg", "own-two"]\nseed = [0, 1]\n'
PLUGIN = """
from holdfast.core.registry import register
from holdfast.methods.fedavg import FedAvg

@register("method", "own-NAME")
class MyOwn(FedAvg):
    "As fedavg."
"""


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_disk: None, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "config.toml").write_text(CONFIG)
    (tmp_path / "sweep.toml").write_text(CONFIG + SWEEP)
    for name in ("one", "two"):  # a name can be registered once in a process
        (tmp_path / f"{name}.py").write_text(PLUGIN.replace("NAME", name))

    def run(*args: Any) -> Answer:
        with pytest.raises(SystemExit) as left:
            main([str(a) for a in args])
        said = capsys.readouterr()
        return Answer(int(left.value.code or 0), said.out, said.err)

    return run


def hints(answer: Answer) -> list[list[str]]:
    """The commands at the ends of lines, and between backquotes."""
    text = answer.out + answer.err
    found = [*re.findall(r"  holdfast (.*)$", text, re.M), *re.findall(r"`holdfast ([^`]*)`", text)]
    return [shlex.split(one) for one in dict.fromkeys(found)]


@pytest.mark.parametrize(
    "command",
    [
        ("run", "config.toml", "--out", "a run"),
        ("run", "config.toml", "--set", "method.name=own-one", "--plugin", "one.py", "--out", "own"),
        ("sweep", "sweep.toml", "--plugin", "two.py", "--out", "a sweep"),
    ],
)
def test_what_run_sweep_and_resume_print_works(cli: Callable[..., Answer], command: tuple[str, ...]) -> None:
    first = cli(*command)
    assert first.code == 0 and len(hints(first)) == 1
    for hint in hints(first):
        assert cli(*hint).code == 0
    plugin = command[command.index("--plugin") :][:2] if "--plugin" in command else ()
    again = cli("resume", command[-1], *plugin)
    assert again.code == 0 and hints(again) == hints(first)
    (python,) = re.findall(r"in Python +(holdfast\..*)$", first.out, re.M)
    assert len(eval(python, {"holdfast": holdfast})) >= 1
    taken = cli(*command) if command[0] == "run" else cli("run", "config.toml", "--out", command[-1])
    refused(taken, "already holds")
    for hint in hints(taken):
        assert cli(*hint, *plugin).code == 0


def test_the_command_on_the_page_repeats_the_run(cli: Callable[..., Answer], tmp_path: Path) -> None:
    assert cli("run", "config.toml", "--set", "method.name=fedavg", "--out", "one").code == 0
    page = Path(cli("report", "one").out.strip()).read_text()
    command, config = re.findall(r"<pre>(.*?)</pre>", page, re.S)[:2]
    (tmp_path / "config.toml").write_text(config.replace("&#34;", '"').replace("&#39;", "'"))
    assert cli(*shlex.split(command)[1:], "--out", "again").code == 0
    assert holdfast.Run("one").final["loss"] == holdfast.Run("again").final["loss"]


@pytest.mark.slow
def test_the_command_of_a_reproduction_continues_it(cli: Callable[..., Answer], tmp_path: Path) -> None:
    assert cli("reproduce", "fedcap", "table-1", "--scale", "smoke").code == 0
    page = tmp_path / "reproductions" / "fedcap" / "table-1-smoke" / "report.html"
    (command,) = re.findall(r"<pre>holdfast (.*?)</pre>", page.read_text(), re.S)
    assert cli(*shlex.split(command)).code == 0 and cli("report", page.parent).code == 0


@pytest.mark.parametrize("command", ["run", "sweep", "plan", "data", "tune"])
def test_what_is_no_config_is_refused_in_one_line(
    cli: Callable[..., Answer], tmp_path: Path, command: str
) -> None:
    more = ("--budget", "2") if command == "tune" else ()
    (tmp_path / "folder").mkdir()
    (tmp_path / "bytes.toml").write_bytes(b"\x00\xff\xfe")
    refused(
        cli(command, "nowhere.toml", *more), "config file not found: nowhere.toml", "holdfast show config"
    )
    refused(cli(command, "folder", *more), "folder is a folder, not a config file; name the TOML file in it")
    refused(cli(command, "bytes.toml", *more), "not text in UTF-8")


@pytest.mark.parametrize("command", ["resume", "report", "compare", "diagnose"])
def test_what_is_no_run_is_refused_in_one_line(
    cli: Callable[..., Answer], tmp_path: Path, command: str
) -> None:
    (tmp_path / "empty").mkdir()
    refused(cli(command, "nowhere"), "no run in nowhere: there is no such folder")
    refused(cli(command, "empty"), "no run in empty", "name that of a run")
    refused(cli(command, "config.toml"), "config.toml", "a file; name ")
    refused(cli("report", "nowhere", "--format", "png"), "--figures FOLDER")


def test_every_command_has_an_example_in_its_help() -> None:
    def commands(group: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
        found = []
        for name, command in group.commands.items():
            inner = hasattr(command, "commands")
            found += commands(command, (*path, name)) if inner else [((*path, name), command)]
        return found

    known = commands(typer.main.get_command(app))
    assert len(known) > 30
    for path, command in known:
        assert f"holdfast {' '.join(path)}" in " ".join((command.help or "").split()), path
