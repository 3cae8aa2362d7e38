"""Sweeps: fused equals alone, killed and resumed equals never stopped, shards share the work, and bad cells
are contained."""

from __future__ import annotations

import json
import os
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.core.errors import ConfigError, DataError, RunError
from holdfast.core.files import write_if_absent
from holdfast.core.reading import read_json
from holdfast.core.registry import register
from holdfast.engine.client_stack import ClientStack
from holdfast.engine.simulator import Simulator
from holdfast.experiment import build, planner
from holdfast.experiment.config import Config, make_config
from holdfast.experiment.loop import Experiment
from holdfast.methods import ClientRule, Method
from holdfast.methods.averaging import Averaging
from holdfast.models.mlp import Mlp
from holdfast.report.read_runs import by_setting, read_records
from holdfast.results.run import Run
from holdfast.storage.store import Store
from holdfast.sweeps import runner, session
from holdfast.sweeps.grid import expand
from holdfast.sweeps.runner import resume_sweep, sweep
from tests.experiment.kills import STAGES, bits, die_at, digits, in_child, table, was_killed, watched
from tests.helpers import RAGGED, TINY, assert_same, everything, run_all

Cells = list[tuple[str, Config]]


class Stumbles(ClientRule):
    """Fails in the second round, on the clients' side, where it takes the whole exchange with it."""

    def train(self, local: Any, state: Any, received: Any, extra: Any) -> Any:
        if local.round == 2 and not os.environ.get("MENDED"):
            raise ZeroDivisionError("the client\nfell")
        fitted = local.fit(received.model)
        return state, local.report(fitted.model, received, fitted)


@register("method", "test-stumbles")
class StumblesMethod(Method):
    """Fails."""

    Client, Server = Stumbles, Averaging


@pytest.fixture(autouse=True)
def quick(quick_disk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pulls the plug here, and the embedded digits are decoded once, not in each of hundreds of
    runs."""
    monkeypatch.setattr(build, "load_samples", lambda settings: digits())


def cells_of(**grid: Any) -> Cells:
    return [(label, make_config(given)) for label, given in expand({**TINY, "sweep": grid})]


def mixed(plan: str = "vmap") -> Cells:
    """Two that are fused, with BatchNorm, whose bits depend on who else is in the stack; one that fails; and
    one of fewer rounds."""
    norm = {"model": {"name": "mlp", "hidden": 6, "batch_norm": True}}
    ragged = {"data": {"clients": 4, "partition": {"name": "iid", "samples_per_client": 16}}}
    given = {
        "even": table("ditto", plan),
        "ragged": table("ditto", plan) | ragged,
        "bad": table("test-stumbles", plan),
        "short": table("ditto", plan, rounds=2),
    }
    return [(label, make_config(t | norm)) for label, t in given.items()]


def folders(out: Path) -> list[Path]:
    return sorted(folder for folder in out.glob("[0-9]*") if folder.is_dir())


def status_words(statuses: list[Any]) -> list[str]:
    return [run_status.shared or run_status.status for run_status in statuses]


def no_training(patch: pytest.MonkeyPatch) -> None:
    for owner, name in ((planner, "choosing"), (Simulator, "exchange"), (Experiment, "__init__")):
        patch.setattr(
            owner, name, lambda *args, **kwargs: pytest.fail("something was built, measured or trained")
        )


# ---- fused equals alone


def test_cells_of_a_mixed_grid_equal_their_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve cells of different learning rates, lambdas, epochs and partitions, trained as one stack, in
    float64."""
    grid = {
        **TINY,
        "method": "ditto",
        "sweep": {
            "train.lr": [0.05, 0.2],
            "method.lam": [0.1, 1.0, 3.0],
            "data.partition": [RAGGED, {"name": "pathological", "samples_per_client": 20}],
            "override": [
                {"when": {"method.lam": 1.0}, "set": {"train.local_epochs": 3}},
                {"when": {"train.lr": 0.2}, "set": {"seed": 5}},
            ],
        },
    }
    tables = [given for _, given in expand(grid)]
    sizes: list[int] = []
    perform = ClientStack.perform
    with monkeypatch.context() as patch:
        patch.setattr(
            ClientStack,
            "perform",
            lambda self, calls, *rest: sizes.append(len(calls)) or perform(self, calls, *rest),
        )
        together = run_all(tables, tmp_path / "together")
    assert len(together) == 12 and set(sizes) == {12}, "all were one computation"
    for place, (given, run) in enumerate(zip(tables, together, strict=True)):
        assert_same(everything(run), everything(run_all([given], tmp_path / f"alone{place}")[0]), 1e-10)
    assert len({run.final["loss"] for run in together}) == 12


# ---- killed and resumed


def check_resumed(
    out: Path, whole: Path, cells: Cells, again: str, monkeypatch: pytest.MonkeyPatch, about: str
) -> None:
    with monkeypatch.context() as patch:
        if list(out.glob("groups/*.json")):
            patch.setattr(planner, "choosing", lambda *args: pytest.fail("the plan was measured again"))
        statuses = (
            resume_sweep(out) if again == "resume" and (out / "sweep.json").exists() else sweep(cells, out)
        )
    assert status_words(statuses) == ["finished", "finished", "failed", "finished"], about
    for folder in folders(whole):
        if folder.name == "002-bad":
            failures = [read_json(path / folder.name / "failure.json") or {} for path in (out, whole)]
            assert failures[0] | {"time": ""} == failures[1] | {"time": ""} and failures[0]["round"] == 2
        else:
            assert bits(out / folder.name) == bits(folder), f"{folder.name}, {about}"
    assert not list(out.rglob("*.writing"))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.long])])
@pytest.mark.parametrize("plan", ["loop", pytest.param("vmap", marks=pytest.mark.slow)])
def test_a_sweep_killed_at_any_stage_resumes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str, every: bool
) -> None:
    """From before the first file to after the last result: the same command, or `resume`, ends with the same
    bits."""
    monkeypatch.setattr("tests.experiment.kills.STAGES", [*STAGES, (os, "link"), (os, "mkdir")])
    cells, seen = mixed(plan), []
    with watched(seen.append):
        sweep(cells, tmp_path / "whole")
    assert {"os.link", "os.mkdir", "Store.commit", "RowStore.stage"} <= set(seen)
    for event in range(0, len(seen), 1 if every else 53):
        out = tmp_path / f"{event}"
        assert was_killed(in_child(lambda event=event, out=out: die_at(event, cells, out))), (
            event,
            seen[event],
        )  # type: ignore[misc]
        again = ("resume", "same")[event % 2]
        check_resumed(
            out,
            tmp_path / "whole",
            cells,
            again,
            monkeypatch,
            f"killed before event {event}, {seen[event]}, then {again}",
        )


def test_a_sweep_killed_before_all_manifests_were_written_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group's terms are on disk before any manifest, so the plan is not chosen again, though it would be
    another one now."""
    cells = [
        (label, make_config({**config.plain(), "engine": {"plan": "auto", "threads": 1}}))
        for label, config in mixed()
    ]

    def die() -> None:
        write = Store.write_json

        def strike(self: Store, name: str, content: Any) -> None:
            if name == "manifest.json" and self.path.name == "002-bad":
                os.kill(os.getpid(), signal.SIGKILL)
            write(self, name, content)

        monkeypatch.setattr(Store, "write_json", strike)
        sweep(cells, tmp_path / "cut")

    assert was_killed(in_child(die))
    assert [(folder / "manifest.json").exists() for folder in folders(tmp_path / "cut")] == [
        True,
        True,
        False,
        False,
    ]
    group = json.loads((tmp_path / "cut" / "groups" / "000.json").read_text())
    group["plans"] = [
        {**plan, "name": "vmap", "rows": 3} for plan in group["plans"]
    ]  # as if that had been measured then
    (tmp_path / "cut" / "groups" / "000.json").write_text(json.dumps(group))
    with monkeypatch.context() as patch:
        patch.setattr(planner, "choosing", lambda *args: pytest.fail("the plan was measured again"))
        statuses = resume_sweep(tmp_path / "cut")
    assert status_words(statuses) == ["finished", "finished", "failed", "finished"]
    assert json.loads((folders(tmp_path / "cut")[3] / "manifest.json").read_text())["plan"]["rows"] == 3


def test_finished_cells_are_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = cells_of(seed=[0, 1, 2])
    first = sweep(cells, tmp_path / "s")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "s").rglob("*")}
    with monkeypatch.context() as patch:
        no_training(patch)
        assert sweep(cells, tmp_path / "s") == first == resume_sweep(tmp_path / "s")
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "s").rglob("*")} == before
    (folders(tmp_path / "s")[1] / "result.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(planner, "choosing", lambda *args: pytest.fail("the plan was measured again"))
        patch.setattr(Simulator, "exchange", lambda *args: pytest.fail("a committed round ran again"))
        assert sweep(cells, tmp_path / "s") == first


# ---- one directory, one sweep


@pytest.mark.parametrize(
    "grid, words",
    [
        ({"seed": [0, 1, 2]}, "2 cells, but the config gives 3 (it has no 'seed=2')"),
        ({"seed": [0, 2]}, "it has 'seed=1'"),
        (
            {"seed": [0, 1], "override": [{"when": {"seed": 1}, "set": {"train.lr": 0.3}}]},
            "train.lr is 0.1 in its cell 'seed=1', here 0.3",
        ),
    ],
)
def test_another_sweep_in_the_same_directory_is_refused(
    tmp_path: Path, grid: dict[str, Any], words: str
) -> None:
    sweep(cells_of(seed=[0, 1]), tmp_path / "s")
    with pytest.raises(ConfigError) as error:
        sweep(cells_of(**grid), tmp_path / "s")
    assert (
        "holds another sweep" in str(error.value)
        and words in str(error.value)
        and "\n" not in str(error.value)
    )


def test_a_sweep_that_is_older_than_a_setting_continues(tmp_path: Path) -> None:
    sweep(cells_of(seed=[0, 1]), tmp_path / "s")
    file = tmp_path / "s" / "sweep.json"
    content = json.loads(file.read_text())
    for cell in content["cells"]:
        del cell["config"]["evaluate"]["metrics"], cell["config"]["engine"]["workers"]
    file.write_text(json.dumps(content))
    assert sweep(cells_of(seed=[0, 1]), tmp_path / "s")


def test_runs_and_sweeps_do_not_share_a_directory(tmp_path: Path) -> None:
    sweep(cells_of(seed=[0, 1]), tmp_path / "s")
    with pytest.raises(ConfigError, match="already holds a run"):
        session.start(cells_of()[:1], tmp_path / "s")
    session.start(cells_of()[:1], tmp_path / "runs" / "one")
    for out in (tmp_path / "runs", tmp_path / "runs" / "one"):
        with pytest.raises(ConfigError, match="already holds (a run|runs)"):
            sweep(cells_of(seed=[0, 1]), out)


def test_a_sweep_that_cannot_begin_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "choosing", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sweep(cells_of(seed=[0, 1]), tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_one_of_several_writers_succeeds(tmp_path: Path) -> None:
    children = []
    for number in range(6):
        child = os.fork()
        if child == 0:
            write_if_absent(tmp_path / "sweep.json", {"by": number})
            os._exit(0 if (read_json(tmp_path / "sweep.json") or {}).get("by") is not None else 1)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    assert [file.name for file in tmp_path.iterdir()] == ["sweep.json"] and (
        read_json(tmp_path / "sweep.json") or {}
    )["by"] in range(6)


@pytest.mark.parametrize("file", ["sweep.json", "groups/000.json"])
def test_a_damaged_record_is_a_one_line_error(tmp_path: Path, file: str) -> None:
    sweep(cells_of(seed=[0, 1]), tmp_path / "s")
    (folders(tmp_path / "s")[0] / "result.json").unlink()
    (tmp_path / "s" / file).write_text("{}")
    with pytest.raises(RunError) as error:
        resume_sweep(tmp_path / "s")
    assert "is damaged" in str(error.value) and "\n" not in str(error.value)


# ---- shards


def test_shards_are_blocks_of_nearly_equal_size(tmp_path: Path) -> None:
    folder = runner.SweepFolder(tmp_path, cells_of(seed=list(range(10))))
    for of in (1, 3, 4, 10, 13):
        parts = [folder.shard(number, of) for number in range(1, of + 1)]
        assert [place for part in parts for place in part] == folder.cells
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("shard", [(0, 2), (3, 2), (1, 0), (-1, -1)])
def test_wrong_shard_numbers_are_refused(tmp_path: Path, shard: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="numbered from 1"):
        sweep(cells_of(seed=[0, 1]), tmp_path / "s", shard=shard)
    assert not (tmp_path / "s").exists()


def test_two_shards_at_once_finish_one_sweep(tmp_path: Path) -> None:
    """Each is, bit for bit, what it is on its own, and in float64 to 1e-10 what the whole sweep is in one
    process."""
    cells = cells_of(seed=[0, 1, 2], **{"train.lr": [0.05, 0.1]})

    def both(out: Path, at_once: bool) -> None:
        children = []
        for number in (1, 2):
            child = os.fork()
            if child == 0:
                sweep(cells, out, shard=(number, 2))
                os._exit(0)
            children.append(child)
            if not at_once:
                os.waitpid(children.pop(), 0)
        assert all(os.waitpid(child, 0)[1] == 0 for child in children)

    both(tmp_path / "at once", True)
    both(tmp_path / "in turn", False)
    assert status_words(sweep(cells, tmp_path / "at once")) == ["finished"] * 6
    sweep(cells, tmp_path / "one")
    assert (
        len(list((tmp_path / "at once" / "groups").iterdir())) == 2
        and len(list((tmp_path / "one" / "groups").iterdir())) == 1
    )
    for folder in folders(tmp_path / "one"):
        assert bits(tmp_path / "at once" / folder.name) == bits(tmp_path / "in turn" / folder.name)
        assert_same(everything(Run(tmp_path / "at once" / folder.name)), everything(Run(folder)), 1e-10)


def test_statuses_of_other_shards_are_marked(tmp_path: Path) -> None:
    cells = cells_of(seed=[0, 1, 2])
    said: list[str] = []
    nothing = sweep(cells, tmp_path / "s", session.RunCallbacks(say=said.append), shard=(1, 5))
    assert status_words(nothing) == ["other shard"] * 3
    assert said == ["shard 1/5 is empty: the sweep has 3 cells"]
    seen = sweep(cells, tmp_path / "s", shard=(2, 3))
    assert [run_status.words for run_status in seen] == [
        "other shard: not begun",
        "finished",
        "other shard: not begun",
    ]
    assert [run_status.mine for run_status in seen] == [False, True, False]
    assert status_words(resume_sweep(tmp_path / "s")) == ["finished"] * 3
    assert len(list((tmp_path / "s" / "groups").iterdir())) == 2


def stop_in_round(round: int, cells: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C when the sweep asks its clients for something in this round."""
    exchange = Simulator.exchange

    def stop(self: Simulator, calls: Any) -> Any:
        if calls[0].run_context.round == round:
            raise KeyboardInterrupt
        return exchange(self, calls)

    with monkeypatch.context() as patch:
        patch.setattr(Simulator, "exchange", stop)
        with pytest.raises(KeyboardInterrupt):
            sweep(cells, out)


def test_a_group_that_has_begun_is_continued_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun as one, continued as a shard: on vmap a part of it would have other bits."""
    cells = mixed()[:2]
    sweep(cells, tmp_path / "whole")
    stop_in_round(2, cells, tmp_path / "cut", monkeypatch)
    assert status_words(sweep(cells, tmp_path / "cut", shard=(2, 2))) == ["finished", "finished"]
    for folder in folders(tmp_path / "whole"):
        assert bits(tmp_path / "cut" / folder.name) == bits(folder)


def test_a_locked_cell_is_not_run(tmp_path: Path) -> None:
    cells = cells_of(seed=[0, 1, 2])
    sweep(cells, tmp_path / "s", shard=(1, 3))
    other = Store(tmp_path / "s" / "001-seed=1").open()  # as another process would
    statuses = sweep(cells, tmp_path / "s")
    assert status_words(statuses) == ["finished", "running elsewhere", "finished"]
    assert statuses[1].words == "running elsewhere: not begun" and not (other.path / "manifest.json").exists()
    other.close()
    assert status_words(sweep(cells, tmp_path / "s")) == ["finished"] * 3


def test_a_group_of_which_one_cell_is_locked_waits(tmp_path: Path) -> None:
    cells = cells_of(seed=[0, 1])
    sweep(cells, tmp_path / "s")
    for folder in folders(tmp_path / "s"):
        (folder / "result.json").unlink()
    other = Store(tmp_path / "s" / "001-seed=1").open()
    assert status_words(sweep(cells, tmp_path / "s")) == ["running elsewhere"] * 2
    other.close()
    assert status_words(sweep(cells, tmp_path / "s")) == ["finished"] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_group_keeps_its_device(tmp_path: Path) -> None:
    cells = cells_of(seed=[0, 1])
    sweep(cells, tmp_path / "s")
    (folders(tmp_path / "s")[0] / "result.json").unlink()
    file = tmp_path / "s" / "groups" / "000.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"device": "cuda"}))
    with pytest.raises(
        RunError,
        match="began on cuda, which this machine does not have; --device cpu continues, with other bits",
    ):
        resume_sweep(tmp_path / "s")
    assert status_words(resume_sweep(tmp_path / "s", device="cpu")) == ["finished"] * 2


# ---- cells that go wrong


def test_a_cell_that_fails_is_contained_and_tried_again_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = mixed()
    statuses = sweep(cells, tmp_path / "s")
    assert status_words(statuses) == ["finished", "finished", "failed", "finished"]
    line = Stumbles.train.__code__.co_firstlineno + 2
    assert (
        statuses[2].words
        == f"failed in round 2: ZeroDivisionError: the client fell (test_sweep.py, line {line})"
    )
    assert statuses[2].result is None
    failure = read_json(statuses[2].path / "failure.json") or {}
    assert (
        failure.keys() == {"round", "error", "reason", "where", "time"}
        and failure["error"] == "ZeroDivisionError"
    )
    assert failure["where"] == f"{__file__}, line {line}, in train"
    trace = (statuses[2].path / "traceback.txt").read_text()
    assert (
        f'test_sweep.py", line {line}, in train' in trace and "ZeroDivisionError: the client\nfell" in trace
    )
    with monkeypatch.context() as patch:
        no_training(patch)
        assert sweep(cells, tmp_path / "s") == statuses, "not tried again"
    assert status_words(sweep(cells, tmp_path / "s", retry=True))[2] == "failed"
    monkeypatch.setenv("MENDED", "yes")
    before = [bits(folder) for folder in folders(tmp_path / "s") if folder.name != "002-bad"]
    assert status_words(resume_sweep(tmp_path / "s", retry=True)) == ["finished"] * 4
    assert (
        not {"failure.json", "traceback.txt"} & {file.name for file in statuses[2].path.iterdir()}
        and Run(statuses[2].path).round == 3
    )
    assert before == [bits(folder) for folder in folders(tmp_path / "s") if folder.name != "002-bad"]


def test_a_network_that_cannot_take_a_step_is_contained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails when plans are tried, before anything is committed; mended, it is begun as a group of its
    own."""
    forward = Mlp.build

    def build(self: Any, *args: Any) -> Any:
        made = forward(self, *args)
        if self.hidden == 7 and not os.environ.get("MENDED"):
            made.backbone.register_forward_hook(lambda module, given, out: 1 / 0)
        return made

    monkeypatch.setattr(Mlp, "build", build)
    cells = [
        (label, make_config(given))
        for label, given in expand({**TINY, "sweep": {"model.hidden": [6, 7], "seed": [0, 1]}})
    ]
    statuses = sweep(cells, tmp_path / "s")
    assert status_words(statuses) == ["finished", "finished", "failed", "failed"]
    words = r"failed before its first round: ZeroDivisionError: division by zero \(test_sweep.py, line \d+\)"
    assert re.fullmatch(words, statuses[2].words)
    with monkeypatch.context() as patch:
        no_training(patch)
        assert sweep(cells, tmp_path / "s") == statuses, "not tried again"
    assert sweep(cells, tmp_path / "s", retry=True)[2].status == "failed"
    before = [bits(folder) for folder in folders(tmp_path / "s")[:2]]
    monkeypatch.setenv("MENDED", "yes")
    assert status_words(resume_sweep(tmp_path / "s", retry=True)) == ["finished"] * 4
    assert not list((tmp_path / "s").glob("*/failure.json"))
    assert before == [bits(folder) for folder in folders(tmp_path / "s")[:2]]


def test_a_cell_that_cannot_be_built_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="lower data.clients .in the sweep's cell 'clients=5000 iid'"):
        sweep(cells_of(**{"data.clients": [4, 5000], "data.partition.name": ["iid"]}), tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_retried_cell_does_not_join_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in the middle of their runs; their bits are those of a sweep in which it failed and stayed
    away."""
    cells = mixed()
    sweep(cells, tmp_path / "whole")
    stop_in_round(3, cells, tmp_path / "cut", monkeypatch)
    assert (tmp_path / "cut" / "002-bad" / "failure.json").exists()
    monkeypatch.setenv("MENDED", "yes")
    assert status_words(sweep(cells, tmp_path / "cut", retry=True)) == ["finished"] * 4
    for folder in folders(tmp_path / "whole"):
        if folder.name != "002-bad":
            assert bits(tmp_path / "cut" / folder.name) == bits(folder)


def test_a_cell_that_diverges_does_not_stop_the_others_and_is_reported(tmp_path: Path) -> None:
    """Every reply is refused for what is not finite, so the run keeps its old model and would look alive."""
    grid = {"train.lr": [0.1, 1e200], "seed": [0, 1]}
    statuses = sweep(cells_of(**grid), tmp_path / "s")
    assert status_words(statuses) == ["finished", "finished", "diverged", "diverged"]
    assert "nothing that the 5 clients sent was finite" in statuses[2].words and statuses[2].words.startswith(
        "diverged in round 1"
    )
    run = Run(statuses[2].path)
    assert (
        run.round == 2
        and run.final["diverged"] == 1
        and run.final["refused"] == 10
        and run.final["accuracy"] is not None
    )
    assert Run(statuses[0].path).final["diverged"] is None
    alone = session.start([("", cells_of()[0][1])], tmp_path / "alone")
    assert alone[0]["final"]["loss"] == pytest.approx(Run(statuses[0].path).final["loss"], abs=1e-10)


def test_a_full_disk_is_not_recorded_as_a_failed_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells, count = cells_of(seed=[0, 1]), 0
    sweep(cells, tmp_path / "whole")

    def full(handle: int) -> None:
        nonlocal count
        count += 1
        if count == 45:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(holdfast.HoldfastError, match="the disk is full"):
            sweep(cells, tmp_path / "s")
    assert not list((tmp_path / "s").rglob("failure.json")) and not list((tmp_path / "s").rglob("*.writing"))
    assert status_words(sweep(cells, tmp_path / "s")) == ["finished"] * 2
    assert all(bits(tmp_path / "s" / folder.name) == bits(folder) for folder in folders(tmp_path / "whole"))


# ---- from Python


def test_a_sweep_from_python(tmp_path: Path) -> None:
    model = holdfast.Model(
        lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), head=None
    )
    given = {**TINY, "model": model, "sweep": {"method.name": ["fedavg", "test-stumbles"], "seed": [0, 1]}}
    runs = holdfast.sweep(given, out=tmp_path / "s", shard=(1, 2))
    assert [cell.status for cell in runs] == ["finished", "finished", "other shard", "other shard"] and runs[
        3
    ].run is None
    assert (
        isinstance(runs[0].run, holdfast.Run)
        and runs[0].run.model() is not None
        and runs[0].final is not None
    )
    with pytest.raises(ConfigError, match="model was a Python object; call holdfast.sweep"):
        holdfast.resume(tmp_path / "s")
    runs = holdfast.sweep(given, out=tmp_path / "s")
    assert [cell.status for cell in runs] == ["finished", "finished", "failed", "failed"]
    assert (
        runs[2].final is None
        and runs[2].reason.startswith("ZeroDivisionError: the client fell (")
        and runs[2].round == 2
    )


def losses_of(*scales: float) -> list[Any]:
    def scaled(scale: float) -> Any:
        return lambda net, batch: (
            scale * torch.nn.functional.cross_entropy(net(batch.x), batch.y, reduction="none")
        )

    return [scaled(scale) for scale in scales]


def objects(losses: list[Any]) -> dict[str, Any]:
    model = holdfast.Model(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), head=None)
    return {**TINY, "model": model, "sweep": {"train.loss": losses, "seed": [0, 1]}}


def test_a_sweep_over_objects_continues_when_they_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another process would: the objects are others, and lie elsewhere."""
    torch.manual_seed(0)
    given = objects(losses_of(1.0, 3.0))
    whole = holdfast.sweep(given, out=tmp_path / "whole")
    assert [cell.label for cell in whole] == [
        f"loss=lambda(scale={s}) seed={n}" for s in (1.0, 3.0) for n in (0, 1)
    ]
    assert len(by_setting(read_records(tmp_path / "whole"))) == 2, "two losses, each under two seeds"
    holdfast.sweep(given, out=tmp_path / "cut", shard=(1, 2))
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=r"Python objects \(model, train.loss\); .* code cannot be compared"):
        again = holdfast.sweep(objects(losses_of(1.0, 3.0)), out=tmp_path / "cut")
    assert [cell.status for cell in again] == ["finished"] * 4
    assert [cell.final["accuracy"] for cell in again] == pytest.approx(
        [cell.final["accuracy"] for cell in whole], abs=1e-10
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is left to run_all, so nothing can be mixed
        holdfast.sweep(objects(losses_of(1.0, 3.0)), out=tmp_path / "cut")
    with pytest.raises(ConfigError, match="holds another sweep"):
        holdfast.sweep(objects(losses_of(3.0, 1.0)), out=tmp_path / "cut")


def test_objects_with_equal_names_are_separate_lines(tmp_path: Path) -> None:
    losses = [
        lambda net, batch: torch.nn.functional.cross_entropy(net(batch.x), batch.y, reduction="none"),
        lambda net, batch: 0 * net(batch.x).sum(1),
    ]
    cells = holdfast.sweep(objects(losses), out=tmp_path / "s")
    assert [cell.label for cell in cells] == [
        f"loss=lambda-{number} seed={seed}" for number in (1, 2) for seed in (0, 1)
    ]
    assert [line.seeds for line in by_setting(read_records(tmp_path / "s"))] == [2, 2]
