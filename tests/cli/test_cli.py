"""The command line as a user meets it: results, JSON, and above all refusals."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.cli.app import reflow
from holdfast.cli.part_text import example
from holdfast.core import registry
from holdfast.core.registry import KINDS, describe, parts
from holdfast.experiment.config import make_config
from holdfast.interactive.progress import Follow
from holdfast.results.run import load
from tests.cli.commands import HERE, Answer, refused

SMALL = [
    "--set",
    "train.rounds=2",
    "--set",
    "data.clients=4",
    "--set",
    "train.local_epochs=1",
    "--plan",
    "loop",
    "--set",
    "engine.threads=1",
]


# ---- running


def test_run_prints_a_table_and_where_the_run_is(cli: Callable[..., Answer], tmp_path: Path) -> None:
    answer = cli("run", *SMALL, "--out", tmp_path / "a")
    assert answer.code == 0
    assert (
        "fedcap" in answer.out
        and "worst 10 %" in answer.out
        and f"holdfast report {tmp_path / 'a'}" in answer.out
    )
    assert "plan loop" in answer.err and "2/2 rounds  accuracy 0." in answer.err


def test_a_run_that_diverged_has_an_exit_code_of_its_own(cli: Callable[..., Answer]) -> None:
    for command in (("run", *SMALL, "--set", "train.lr=1e30", "--out", "a"), ("resume", "a")):
        answer = cli(*command)
        assert answer.code == 3 and "fedcap" in answer.out and "Traceback" not in answer.err
        last = answer.err.strip().splitlines()[-1]
        assert last.startswith("diverged in round 1: ") and last.endswith(
            "; lower train.lr (now 1e+30) (exit code 3)"
        )
    shown = cli("resume", "a", "--json")
    assert shown.code == 3 and json.loads(shown.out)["final"]["diverged"] == 1
    assert "exit code is 3" in " ".join(cli("run", "--help").out.split())


def test_without_out_a_new_folder_under_runs(cli: Callable[..., Answer], tmp_path: Path) -> None:
    assert cli("run", *SMALL).code == 0
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_json_of_a_run_is_the_contract(cli: Callable[..., Answer], tmp_path: Path) -> None:
    loud = tmp_path / "loud.py"
    loud.write_text("print('a plug-in that talks')\n")
    answer = cli(
        "run", *SMALL, "--set", "method.name=fedavg", "--out", tmp_path / "a", "--plugin", loud, "--json"
    )
    result = json.loads(answer.out)
    assert set(result) == {"run_dir", "rounds", "final", "protocol"}
    assert result["run_dir"] == str(tmp_path / "a") and result["rounds"] == 2
    assert 0 <= result["final"]["accuracy"] <= 1 and result["final"]["rounds_to/0.80"] is None
    assert result["protocol"]["deployed"] == "global"
    assert "talks" in answer.err


def test_a_finished_run_is_given_more_rounds(cli: Callable[..., Answer], tmp_path: Path) -> None:
    cli("run", *SMALL, "--out", tmp_path / "a")
    assert json.loads(cli("resume", tmp_path / "a", "--rounds", "3", "--json").out)["rounds"] == 3
    refused(cli("resume", tmp_path / "a", "--rounds", "2"), "begun with 3 rounds", "give 3 or more, not 2")


def test_the_shell_completes_kinds_and_names() -> None:
    from holdfast.cli.parts import complete_kind, complete_name

    assert complete_kind("de") == ["detector"] and complete_name("dit") == ["ditto"]
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli"],
        env={
            **os.environ,
            "_HOLDFAST_COMPLETE": "complete_bash",
            "COMP_WORDS": "holdfast re",
            "COMP_CWORD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert set(done.stdout.split()) == {"resume", "report", "reproduce"}


def test_configured_metrics_are_shown(cli: Callable[..., Answer], tmp_path: Path) -> None:
    asked = ("run", *SMALL, "--set", "evaluate.metrics=['auc', 'macro_f1', 'auc']", "--out", tmp_path / "a")
    said = cli(*asked).out
    again = cli("resume", tmp_path / "a", "--json")
    result = json.loads(again.out)
    final = result["final"]
    assert result["protocol"]["metrics"] == ["auc", "macro_f1"] and 0 <= final["auc"] <= 1
    assert {"macro_f1/global", "auc/worst10", "auc/clients"} <= set(
        final
    ) and "balanced_accuracy" not in final
    table = [line.split() for line in said.splitlines() if "macro-F1" in line or line.startswith("fedavg")]
    assert said.count("AUC") == said.count("macro-F1") == 1 and "balanced" not in said
    assert table[0].index("macro-F1") < table[0].index("AUC") < table[0].index("sent")
    assert f"{100 * final['macro_f1']:.1f} %" in said and f"{100 * final['auc']:.1f} %" in said


def test_a_sweep_is_one_row_per_cell_and_one_json(cli: Callable[..., Answer], tmp_path: Path) -> None:
    config = tmp_path / "sweep.toml"
    config.write_text('[sweep]\n"method.name" = ["local", "fedavg"]\nseed = [0, 1]\n')
    answer = cli("run", config, *SMALL, "--out", tmp_path / "s")
    assert all(
        name in answer.out
        for name in ("local seed=0", "local seed=1", "fedavg seed=0", "fedavg seed=1", "over seeds")
    )
    result = json.loads(cli("resume", tmp_path / "s", "--json").out)
    assert set(result) == {"run_dir", "cells"}
    assert [c["label"] for c in result["cells"]] == [
        "local seed=0",
        "local seed=1",
        "fedavg seed=0",
        "fedavg seed=1",
    ]
    assert all({"run_dir", "rounds", "final", "protocol"} <= set(c) for c in result["cells"])


def test_options_are_settings(cli: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    cli(
        "run",
        *SMALL,
        "--out",
        tmp_path / "a",
        "--memory",
        "300MB",
        "--data-dir",
        "data",
        "--device",
        "cpu",
        "--workers",
        "2",
        "--precision",
        "bf16",
    )
    config = json.loads((tmp_path / "a" / "manifest.json").read_text())["config"]
    assert config["engine"] == {
        "plan": "loop",
        "device": "cpu",
        "memory": "300MB",
        "server": "auto",
        "threads": 1,
        "workers": 2,
        "precision": "bf16",
    }
    assert config["data"]["dir"] == str(tmp_path / "data")


def test_a_data_dir_that_is_not_there_is_refused(cli: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    for command in (["run"], ["sweep"], ["plan"], ["data"], ["reproduce", "fedcom", "--dry-run"]):
        refused(
            cli(*command, "--data-dir", "nowhere"), f"--data-dir: there is no folder {tmp_path / 'nowhere'}"
        )
    refused(cli("run", "--data-dir", "a-file"), "--data-dir: there is no folder")


def test_a_home_directory_in_data_dir_is_expanded(
    cli: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "sets").mkdir()
    cli("run", *SMALL, "--out", tmp_path / "a", "--data-dir=~/sets")
    assert json.loads((tmp_path / "a" / "manifest.json").read_text())["config"]["data"]["dir"] == str(
        tmp_path / "sets"
    )
    for command in ("run", "data"):
        refused(
            cli(command, "--data-dir=~nobody-at-all/sets"),
            "--data-dir: ~nobody-at-all/sets begins with the home directory",
        )


def test_a_plugin_is_chosen_by_name(cli: Callable[..., Answer], tmp_path: Path, forget: None) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from holdfast.core.registry import register\nfrom holdfast.methods.fedavg import FedAvg\n\n"
        "@register('method', 'mine')\nclass Mine(FedAvg):\n    '''My own.'''\n"
    )
    answer = cli("run", *SMALL, "--set", "method.name=mine", "--plugin", plugin, "--out", tmp_path / "a")
    assert answer.code == 0 and "mine" in answer.out
    assert f"holdfast report {tmp_path / 'a'} --plugin {plugin}" in answer.out
    assert cli("resume", tmp_path / "a", "--plugin", plugin, "--json").code == 0
    assert "mine" in cli("list", "methods", "--plugin", plugin).out
    assert json.loads(cli("show", "mine", "--plugin", plugin, "--json").out)["summary"] == "My own."


def test_resume_asks_for_the_plugin_of_a_partition(
    cli: Callable[..., Answer], tmp_path: Path, forget: None
) -> None:
    plugin = tmp_path / "halves.py"
    plugin.write_text(
        "from holdfast.core.registry import register\nfrom holdfast.data.partitions.iid import Iid\n"
        "@register('partition', 'halves')\nclass Halves(Iid):\n    'Mine.'\n"
    )
    assert (
        cli("run", *SMALL, "--set", "data.partition=halves", "--plugin", plugin, "--out", tmp_path / "a").code
        == 0
    )
    registry._PARTS["partition"].pop("halves")
    refused(
        cli("resume", tmp_path / "a"),
        "unknown partition 'halves'",
        "used plug-ins",
        str(plugin),
        "pass --plugin",
    )


def test_looking_at_a_run_does_not_execute_its_plugins(
    cli: Callable[..., Answer], tmp_path: Path, forget: None
) -> None:
    plugin, trace = tmp_path / "mine.py", tmp_path / "was-here"
    plugin.write_text(
        "from holdfast import register\nfrom holdfast.methods.fedavg import FedAvg\n\n"
        "@register('method', 'mine-again')\nclass Mine(FedAvg):\n    '''My own.'''\n"
    )
    assert (
        cli(
            "run", *SMALL, "--set", "method.name=mine-again", "--plugin", plugin, "--out", tmp_path / "a"
        ).code
        == 0
    )
    del registry._PARTS["method"]["mine-again"]  # as in a new process
    moved = tmp_path / "moved.py"
    moved.write_text(plugin.read_text() + f"open({str(trace)!r}, 'w').close()\n")
    manifest = tmp_path / "a" / "manifest.json"
    manifest.write_text(
        manifest.read_text().replace(str(plugin), str(moved))
    )  # a directory that another user made
    assert cli("report", tmp_path / "a").code == 0
    assert "mine-again" in cli("report", tmp_path / "a", "--markdown").out
    assert len(load(tmp_path / "a")) == 2
    refused(
        cli("resume", tmp_path / "a"),
        "unknown method 'mine-again'",
        "used plug-ins",
        str(moved),
        "if you trust them, pass --plugin",
    )
    assert not trace.exists()
    assert cli("report", tmp_path / "a", "--plugin", moved).code == 0 and trace.exists()
    assert cli("resume", tmp_path / "a", "--plugin", moved, "--json").code == 0


def test_progress_bars_on_a_terminal(
    cli: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr.__class__, "isatty", lambda self: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    answer = cli("run", *SMALL, "--out", tmp_path / "a")
    assert "2/2" in answer.err and "accuracy 0." in answer.err and "2/2 rounds" not in answer.err


# ---- stopping and going on


def interrupted(monkeypatch: pytest.MonkeyPatch, when: Callable[[Any], bool]) -> None:
    """As if Ctrl-C were pressed at that point."""
    plain = Follow.moved

    def moved(self: Follow, experiment: Any) -> None:
        plain(self, experiment)
        if when(experiment):
            raise KeyboardInterrupt

    monkeypatch.setattr(Follow, "moved", moved)


def test_ctrl_c_leaves_a_resumable_run(
    cli: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = json.loads(cli("run", *SMALL, "--out", tmp_path / "whole", "--json").out)
    with monkeypatch.context() as patch:
        interrupted(patch, lambda e: e.run_context.round == 2)
        answer = cli("run", *SMALL, "--out", tmp_path / "a")
    assert answer.code == 130 and answer.out == ""
    assert (
        answer.err.strip().splitlines()[-1] == f"interrupted; `holdfast resume {tmp_path / 'a'}` continues it"
    )
    resumed = json.loads(cli("resume", tmp_path / "a", "--json").out)
    same = [name for name in whole["final"] if not name.startswith("seconds/")]
    assert {n: resumed["final"][n] for n in same} == {n: whole["final"][n] for n in same}


@pytest.mark.parametrize("moment", ["say", "planned"])
def test_ctrl_c_before_the_first_commit_keeps_nothing(
    moment: str, cli: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: Follow, news: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Follow, moment, stop)
    answer = cli("run", *SMALL, "--out", tmp_path / "a")
    assert answer.code == 130 and "nothing was saved" in answer.err
    assert not (tmp_path / "a").exists()


def test_a_real_interrupt(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "holdfast.cli",
        "run",
        *SMALL[2:],
        "--set",
        "train.rounds=100000",
        "--out",
        str(tmp_path / "a"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=HERE)
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "a" / "parts" / "000002.json").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130 and out == ""
    assert "Traceback" not in err and f"`holdfast resume {tmp_path / 'a'}` continues it" in err


def test_resume_refuses_a_folder_without_a_run(cli: Callable[..., Answer], tmp_path: Path) -> None:
    refused(cli("resume", tmp_path / "nowhere"), "no run in")


# ---- refusals

BAD_SETTINGS = {
    "wrong key": (["train.lrr=0.1"], ["train.lrr", "'lr'"]),
    "wrong section": (["trian.lr=0.1"], ["trian", "'train'"]),
    "misspelt method": (["method.name=dito"], ["dito", "did you mean 'ditto'"]),
    "misspelt setting": (["method.name=ditto", "method.lamda=1"], ["method.lamda", "'lam'"]),
    "a setting of a method without settings": (
        ["method.name=fedavg", "method.lamm=1"],
        ["method.lamm", "'fedavg' has no settings"],
    ),
    "infinite": (["method.name=ditto", "method.lam=inf"], ["method.lam", "finite", "inf"]),
    "misspelt data": (["data.name=digit"], ["digit", "did you mean 'digits'"]),
    "impossible partition": (["data.partition.samples_per_client=100000"], ["samples_per_client", "1797"]),
    "too many clients": (["data.clients=5000"], ["5000 clients", "lower data.clients"]),
    "no clients": (["data.clients=0"], ["data.clients", "0"]),
    "participation above 1": (["train.participation=1.5"], ["train.participation", "1.5"]),
    "share below 0": (["data.split.test=-0.25"], ["data.split.test", "-0.25"]),
    "shares do not add up": (["data.split.test=0.5"], ["data.split", "1.25"]),
    "dropout above 1": (["train.dropout=2"], ["train.dropout", "2"]),
    "negative lr": (["train.lr=-0.1"], ["train.lr", "-0.1"]),
    "lr is no number": (["train.lr=fast"], ["train.lr", "fast"]),
    "aggregator on local": (
        ["method.name=local", "aggregator.name=mean"],
        ["'local' does not aggregate updates", "aggregator"],
    ),
    "unknown metric": (["evaluate.metrics=['f1']"], ["evaluate.metrics.0", "'macro_f1'", "'f1'"]),
    "unknown device": (["engine.device=tpu"], ["engine.device", "tpu"]),
    "device that cannot train": (["engine.device=meta"], ["engine.device", "meta"]),
    "unknown plan": (["engine.plan=fast"], ["engine.plan", "fast"]),
    "no amount of memory": (["engine.memory=plenty"], ["engine.memory", "plenty"]),
    "not key=value": (["train.lr"], ["--set train.lr", "key=value"]),
    "a section that does not exist": (["seed.x=1", "seed=0"], ["seed"]),
    "method is a number": (["method=5"], ["method"]),
    "data is a number": (["data=5"], ["data"]),
    "empty sweep": (["sweep.seed=[]"], ["sweep.seed"]),
    "wrong in one cell": (["sweep.seed=[0, 1]", "train.lr=-1"], ["train.lr", "seed=0"]),
    "missing dataset": (["data.name=mnist"], ["mnist"]),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings_are_one_line_and_leave_nothing(
    case: str, cli: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)
    changes, fragments = BAD_SETTINGS[case]
    answer = cli(
        "run", *(word for change in changes for word in ("--set", change)), "--out", tmp_path / "a", "--json"
    )
    refused(answer, *fragments)
    assert not (tmp_path / "a").exists()


def test_bad_files_are_refused_in_one_line(cli: Callable[..., Answer], tmp_path: Path) -> None:
    broken, plugin = tmp_path / "broken.toml", tmp_path / "broken.py"
    broken.write_text("[train\nrounds = 3")
    plugin.write_text("raise ValueError('oh')")
    refused(cli("run", tmp_path / "none.toml"), "config file not found", "none.toml")
    refused(cli("run", broken), "not valid TOML", "broken.toml")
    refused(cli("run", tmp_path), "is a folder, not a config file")
    refused(cli("run", "--plugin", tmp_path / "none.py"), "plugin file not found")
    refused(cli("run", "--plugin", plugin), "broken.py failed to load", "ValueError: oh")
    assert not (tmp_path / "runs").exists()


def test_usage_errors_are_one_line(cli: Callable[..., Answer]) -> None:
    refused(cli("rn"), "No such command 'rn'", "holdfast --help")
    refused(cli("run", "--otu", "x"), "No such option", "holdfast run --help")
    refused(cli("resume"), "Missing argument")
    assert cli().code == 2


def test_an_out_that_holds_a_run(cli: Callable[..., Answer], tmp_path: Path) -> None:
    assert cli("run", *SMALL, "--out", tmp_path / "a").code == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "a").rglob("*")}
    refused(
        cli("run", *SMALL, "--out", tmp_path / "a"),
        "already holds a run",
        f"holdfast resume {tmp_path / 'a'}",
    )
    refused(cli("run", *SMALL, "--set", "sweep.seed=[0, 1]", "--out", tmp_path / "a"), "already holds a run")
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "a").rglob("*")} == before


def test_an_out_that_cannot_be_written(cli: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(cli("run", *SMALL, "--out", tmp_path / "file" / "a"), "cannot write", "choose another --out")
    refused(cli("run", *SMALL, "--out", "/proc/none/a"), "/proc/none")


def test_a_disk_that_is_full_from_the_start(
    cli: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        refused(cli("run", *SMALL, "--out", tmp_path / "a"), "the disk is full")
    assert not (tmp_path / "a").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=False)


def test_a_disk_that_fills_up(cli: Callable[..., Answer], small_disk: Path) -> None:
    answer = cli(
        "run", *SMALL, "--set", "method.name=ditto", "--set", "data.clients=20", "--out", small_disk / "a"
    )
    refused(answer, "the disk is full", "holdfast resume")
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert json.loads(cli("resume", small_disk / "a", "--json").out)["rounds"] == 2


def test_debug_shows_where_it_came_from(cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_DEBUG", "1")
    answer = cli("run", "--set", "train.lr=-1")
    assert (
        answer.code == 2
        and "Traceback" in answer.err
        and answer.err.strip().splitlines()[-1].startswith("error: ")
    )


def test_an_internal_error_names_its_file_and_asks_for_a_report(
    cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.sweeps.session.start", divmod)
    answer = cli("run")
    assert answer.code == 1 and "Traceback" in answer.err
    last = answer.err.strip().splitlines()[-1]
    assert last.startswith("error: internal error in holdfast/cli/runs.py, line ") and "please report" in last
    assert "TypeError: divmod" in last


PLUGIN = """
import holdfast
from holdfast.core.registry import Part
from holdfast.methods import ClientRule, Method
from holdfast.methods.averaging import Averaging


class Client(ClientRule):
    def train(self, local, state, received, extra):
        return helper(local)


def helper(local):
    return local.no_such_thing


@holdfast.register("method", "test-cli-mistaken")
class Mistaken(Method):
    'Has a mistake.'

    Client, Server = Client, Averaging


@holdfast.register("loss", "test-cli-mistaken")
class Loss(Part):
    'Has a mistake too.'

    def __call__(self, net, batch):
        return net(batch.x) / None
"""


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "key, line, function, said",
    [
        ("method.name", 14, "helper", "AttributeError: "),
        ("train.loss", 29, "__call__", "TypeError: unsupported operand"),
    ],
)
def test_an_error_in_a_plugin_names_its_file_and_line(
    cli: Callable[..., Answer],
    tmp_path: Path,
    forget: None,
    key: str,
    line: int,
    function: str,
    said: str,
    workers: int,
) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    answer = cli(
        "run",
        *SMALL,
        "--set",
        f"{key}=test-cli-mistaken",
        "--plugin",
        "mine.py",
        "--out",
        "a",
        "--workers",
        workers,
    )
    last = answer.err.strip().splitlines()[-1]
    assert answer.code == 2 and last.startswith("error: ") and said in last, answer.err
    assert f"mine.py, line {line}" in last and "report" not in last
    assert "Traceback" in answer.err and f'mine.py", line {line}, in {function}' in answer.err


def test_a_plugin_that_fails_to_load_is_reported_with_its_line(
    cli: Callable[..., Answer], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("import os\n\nos.no_such_thing\n")
    refused(
        cli("run", "--plugin", "mine.py"),
        "plugin mine.py failed to load: AttributeError",
        "(mine.py, line 3)",
    )


WITHOUT_FLOWER = """
import sys
from holdfast.cli import main

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("flwr", "cryptography"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
for command in sys.stdin.read().splitlines():
    try:
        main(["federation", *command.split()])
    except SystemExit as left:
        print(left.code)
"""


def test_federations_without_flower_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "federation.toml").write_text("")
    commands = [
        "init new --clients 2",
        "up .",
        "resume .",
        "node .",
        "check-node .",
        "privacy .",
        "status .",
        "clients .",
        "logs .",
        "ban . 1",
        "unban . 1",
        "enrol . 1",
        "leave . 1",
        "export . m.safetensors",
        "export . m.safetensors --node .",
        "doctor .",
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FLOWER],
        input="\n".join(commands),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=HERE,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout.split() == ["2"] * len(commands)
    said = "error: a federation needs Flower, which is not installed: pip install 'holdfast[flower]'"
    assert done.stderr.splitlines() == [said] * len(commands)


# ---- cards


def test_help_is_quick_and_has_examples(cli: Callable[..., Answer]) -> None:
    quick = "import sys, holdfast.cli; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", quick], env=HERE).returncode == 0
    listed = {line.split()[1] for line in cli("--help").out.splitlines() if line.startswith("│ ")}
    commands = {name for name in listed if name.isalpha()} - {"federation"}
    assert {"run", "sweep", "resume", "report", "list", "show", "demo", "bench", "plan", "tune"} <= commands
    for command in sorted(commands):
        answer = cli(command, "--help")
        assert answer.code == 0 and "Example" in answer.out and f"holdfast {command}" in answer.out
    assert cli("--version").out.startswith("holdfast ")


def test_help_explains_arguments_and_wraps_paragraphs(
    cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.rstrip() for line in cli("resume", "--help").out.splitlines()]
    assert any("DIR  Directory of the run or sweep. [required]" in line for line in lines)
    start = next(i for i, line in enumerate(lines) if "bit for bit" in line)
    assert len(lines[start]) > 70 and lines[start + 1].endswith(".")  # one paragraph, wrapped once


def test_reflow_joins_paragraphs_and_keeps_indented_blocks() -> None:
    text = """One paragraph
    over two lines.

        kept  as
        it    is

    * an item
    * another

    \b
    Examples:
      holdfast run
    """
    assert reflow(text).splitlines() == [
        "One paragraph over two lines.",
        "",
        "    kept  as",
        "    it    is",
        "",
        "* an item",
        "* another",
        "",
        "\b",
        "Examples:",
        "  holdfast run",
    ]


def test_list_shows_the_parts_of_a_kind(cli: Callable[..., Answer]) -> None:
    cards = json.loads(cli("list", "methods", "--json").out)
    assert {"ditto", "fedavg", "fedavg-ft", "fedprox", "local"} <= {card["name"] for card in cards}
    assert all(card["summary"] and "paper" in card for card in cards)
    assert json.loads(cli("list", "method", "--json").out) == cards
    assert json.loads(cli("list", "losses", "--json").out)[0]["name"] == "cross-entropy"
    assert {row["kind"] for row in json.loads(cli("list", "--json").out)} == set(KINDS)
    assert "dirichlet" in cli("list").out and "Measuring the Effects" in cli("list", "partitions").out
    refused(cli("list", "methos"), "did you mean 'method'")


def test_show_describes_a_part(cli: Callable[..., Answer]) -> None:
    answer = cli("show", "ditto")
    assert "ICML 2021" in answer.out and "lam = 0.1" in answer.out and "strength of the pull" in answer.out
    assert json.loads(cli("show", "ditto", "--json").out)["settings"][0]["name"] == "lam"
    refused(cli("show", "dito"), "did you mean 'ditto'")


def test_show_describes_a_class_of_torch(cli: Callable[..., Answer]) -> None:
    said = cli("show", "torch:nadam")
    assert said.code == 0 and "momentum_decay" in said.out and 'name = "torch:NAdam"' in said.out
    assert "torch.optim has no 'Adem'" in cli("show", "torch:Adem").err


def test_show_config_has_every_section(cli: Callable[..., Answer]) -> None:
    sections = json.loads(cli("show", "config", "--json").out)
    assert list(sections) == ["", "data", "train", "privacy", "evaluate", "engine"]
    assert all(field["help"] for fields in sections.values() for field in fields)
    text = cli("show", "config").out
    assert "[train]" in text and "batch_size" in text and "split.validation" in text and "[sweep]" in text


@pytest.mark.parametrize("kind", KINDS)
def test_examples_on_cards_are_configs(kind: str) -> None:
    for part in parts(kind).values():
        make_config(tomllib.loads(example(describe(part)))).parts()


def test_bench_prints_its_measurements(cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run_bench(
        names: Any, quick: bool, threads: Any, say: Callable[[str], None], device: str
    ) -> dict[str, Any]:
        asked.append((names, quick, threads, device))
        say("timing")
        return {"rows": [{"work": "digits-mlp-100", "plan": "vmap", "seconds": 0.5, "ratio": 7.25}]}

    monkeypatch.setitem(sys.modules, "holdfast.bench.steps", SimpleNamespace(run_bench=run_bench))
    assert "7.25" in cli("bench", "--work", "digits-mlp-100", "--quick").out
    answer = cli("bench", "--json", "--device", "cuda")
    assert json.loads(answer.out)["rows"][0]["plan"] == "vmap" and "timing" in answer.err
    assert asked == [(["digits-mlp-100"], True, None, "cpu"), (None, False, None, "cuda")]
