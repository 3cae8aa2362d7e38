"""Every command on damaged paths, and with variables of the environment that make no sense: exit code 2 and
one line, no traceback."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from holdfast import cli
from holdfast.core.reading import last_lines
from holdfast.experiment.config import make_config
from holdfast.sweeps import session
from tests.bad_bytes.helpers import limited
from tests.experiment.sessions import TINY


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad") / "run"
    session.start([("", make_config({**TINY, "train": {**TINY["train"], "rounds": 1}}))], folder)
    return folder


def told(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says of a damaged path: one line, and a code that is not 0."""
    with limited(60):
        code = cli._run(args)
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if "Warning" not in line]
    assert code == 2 and "Traceback" not in err and len(lines) == 1 and lines[0].startswith("error: "), (
        code,
        out,
        err,
    )
    assert len(lines[0]) < 8100 and lines[0].isprintable()
    return lines[0]


def damaged_path(folder: Path, kind: str, suffix: str) -> Path:
    path = folder / f"bad{suffix}"
    if kind == "folder":
        path.mkdir()
    elif kind == "bytes":
        path.write_bytes(b"\xff\xfe\x00[" * 20)
    elif kind == "deep":
        path.write_bytes(b"a = " + b"[" * 100_000)
    elif kind == "hole":
        path.touch()
        os.truncate(path, 1 << 40)
    return path


CONFIGS: dict[str, list[str]] = {
    "run": ["run", "PATH"],
    "sweep": ["sweep", "PATH"],
    "tune": ["tune", "PATH", "--budget", "1"],
    "plan": ["plan", "PATH"],
    "data": ["data", "PATH"],
}


@pytest.mark.parametrize("kind", ["missing", "folder", "bytes", "deep", "hole"])
@pytest.mark.parametrize("args", CONFIGS.values(), ids=CONFIGS)
def test_a_damaged_config_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], kind: str
) -> None:
    path = damaged_path(tmp_path, kind, ".toml")
    assert str(path) in told([str(path) if word == "PATH" else word for word in args], capsys)


PLUGGED: dict[str, list[str]] = {
    "run": ["run"],
    "list": ["list", "method"],
    "show": ["show", "ditto"],
    "resume": ["resume", "x"],
    "report": ["report", "x"],
    "compare": ["compare", "x"],
    "diagnose": ["diagnose", "x"],
    "customise": ["customise", "x", "--client", "1"],
    "plan": ["plan"],
    "data": ["data"],
    "reproduce": ["reproduce", "fedcap", "table-1"],
}


@pytest.mark.parametrize("args", PLUGGED.values(), ids=PLUGGED)
def test_a_damaged_plugin_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    path = damaged_path(tmp_path, "bytes", ".py")
    assert str(path) in told([*args, "--plugin", str(path)], capsys)


RUNS: dict[str, list[str]] = {
    "resume": ["resume", "RUN"],
    "report": ["report", "RUN"],
    "tables": ["report", "RUN", "--tables", "md"],
    "markdown": ["report", "RUN", "--markdown"],
    "compare": ["compare", "RUN"],
    "diagnose": ["diagnose", "RUN"],
    "norms": ["diagnose", "RUN", "norms"],
    "customise": ["customise", "RUN", "--client", "1"],
}


@pytest.mark.parametrize("name", ["manifest.json", "head.json", "result.json", "parts/000001.json"])
@pytest.mark.parametrize("args", RUNS.values(), ids=RUNS)
def test_a_damaged_run_is_one_line(
    played: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], name: str
) -> None:
    run = Path(shutil.copytree(played, tmp_path / "run"))
    (run / name).write_bytes(b'{"round": 1, "conf\xff')
    args = [str(run) if word == "RUN" else word for word in args]
    unread = {"result.json": ("diagnose", "customise"), "parts/000001.json": ("resume", "customise")}.get(
        name, ()
    )
    if args[0] in unread and not (args[0] == "customise" and cli._run(args)):  # which does not read it
        capsys.readouterr()
        return
    capsys.readouterr()
    told(args, capsys)


@pytest.mark.parametrize("name", ["sweep.json", "study.json"])
@pytest.mark.parametrize("args", [["resume", "RUN"], ["report", "RUN"]], ids=["resume", "report"])
def test_a_damaged_folder_of_runs_is_one_line(
    played: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], name: str
) -> None:
    shutil.copytree(played, tmp_path / "runs" / "000")
    (tmp_path / "runs" / name).write_bytes(b"\xff[")
    told([str(tmp_path / "runs") if word == "RUN" else word for word in args], capsys)


@pytest.mark.parametrize(
    "variable, value",
    [
        ("COLUMNS", "0"),
        ("COLUMNS", "-5"),
        ("COLUMNS", "many"),
        ("COLUMNS", "9" * 20),
        ("COLUMNS", "²"),
        ("LINES", "²"),
        ("HOLDFAST_CACHE", "~nobody/x"),
        ("HOLDFAST_CACHE", "/dev/null"),
        ("HOLDFAST_CACHE", "x" * 5000),
        ("HOLDFAST_DATA", ""),
    ],
)
def test_a_variable_that_makes_no_sense_does_not_end_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    for args in (["list", "method"], ["data", "--set", "data.clients=3"]):
        with limited(60):
            assert cli._run(args) == 0
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("value", ["~nobody/x", "/dev/null", "x" * 5000, "/nowhere"])
def test_an_unusable_data_folder_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    monkeypatch.setenv("HOLDFAST_DATA", value)
    assert "HOLDFAST_DATA" in told(["data", "--set", "data.name=mnist"], capsys)


FEDERATION: list[list[str]] = [
    ["status", "F"],
    ["clients", "F"],
    ["doctor", "F"],
    ["logs", "F"],
    ["ban", "F", "1"],
    ["unban", "F", "1"],
    ["leave", "F", "1"],
    ["enrol", "F", "1"],
    ["export", "F", "OUT"],
    ["up", "F"],
    ["resume", "F"],
    ["privacy", "F"],
    ["node", "F"],
]


@pytest.mark.parametrize("args", FEDERATION, ids=lambda args: args[0])
def test_a_damaged_federation_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    pytest.importorskip("flwr")
    for name in ("federation.toml", "node.toml"):
        (tmp_path / name).write_bytes(b"name = \xff[")
    place = {"F": str(tmp_path), "OUT": str(tmp_path / "out.safetensors")}
    assert ".toml" in told(["federation", *(place.get(word, word) for word in args)], capsys)


@pytest.mark.parametrize(
    "name",
    ["server/ledger.jsonl", "experiment.toml", "server/run/head.json", "server/ca.pem", "nodes/0/key.pub"],
)
@pytest.mark.parametrize("args", FEDERATION[:9], ids=lambda args: args[0])
def test_a_federation_with_a_damaged_file_is_never_a_traceback(
    federation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], name: str
) -> None:
    """Not all commands read all files."""
    folder = Path(shutil.copytree(federation, tmp_path / "ward"))
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b'{"\xff": [\n')
    place = {"F": str(folder), "OUT": str(tmp_path / "out.safetensors")}
    with limited(60):
        code = cli._run(["federation", *(place.get(word, word) for word in args)])
    err = capsys.readouterr().err
    assert "Traceback" not in err and (code in (0, 1) or len(err.splitlines()) == 1), err


def test_of_a_log_of_any_length_only_the_end_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.log").touch()
    os.truncate(tmp_path / "x.log", 1 << 40)
    with open(tmp_path / "x.log", "ab") as file:
        file.write(b"\n" + b"one \xff\n" * 3 + b"two\n")
    with limited(mebibytes=128):
        assert last_lines(tmp_path / "x.log", 2) == ["one \ufffd", "two"]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("flwr")
    from holdfast.deploy.project import init

    return init(tmp_path_factory.mktemp("bad") / "ward", 2, port=1).path
