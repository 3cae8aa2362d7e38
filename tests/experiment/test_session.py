"""Starting and resuming: who may have a directory, what is refused before anything is written, what a
manifest fixes."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.errors import ConfigError, HoldfastError, RunError
from holdfast.engine.simulator import Simulator
from holdfast.experiment import planner
from holdfast.experiment.runner import RunCallbacks
from holdfast.results.run import Run
from holdfast.storage.store import Store
from holdfast.sweeps import session
from tests.experiment.sessions import begin, config


def one_line(error: pytest.ExceptionInfo[Any]) -> str:
    text = str(error.value)
    most = 500 if "not found: searched" in text else 300  # where data was looked for are four places
    assert "\n" not in text and len(text) < most, text
    return text


# ---- nothing is written when something is wrong


@pytest.mark.parametrize(
    "sections, words",
    [
        ({"method": "dito"}, "did you mean 'ditto'"),
        ({"data": {"name": "digit"}}, "did you mean 'digits'"),
        ({"data": {"clients": 100_000}}, "clients"),
        ({"data": {"partition": {"name": "pathological", "classes_per_client": 50}}}, "classes_per_client"),
        ({"method": "local", "aggregator": "mean"}, "does not aggregate updates"),
        ({"train": {"availability": "nowhere.json"}}, "nowhere.json"),
        ({"data": {"name": "mnist", "dir": "/nowhere"}}, "data.dir: there is no folder /nowhere; correct it"),
        ({"data": {"dir": "/nowhere"}}, "data.dir: there is no folder /nowhere"),  # also where it is not used
        ({"engine": {"device": "quantum"}}, "not a device"),
        ({"engine": {"memory": "lots"}}, "engine.memory"),
        ({"model": "fedcap-cnn"}, "16x16"),
        ({"train": {"augment": {"crop": 9}}}, "augment.crop"),
        ({"evaluate": {"clients": "held-out"}}, "held_out"),
        ({"data": {"root": 5000}}, "data.root"),
    ],
)
def test_a_wrong_config_leaves_nothing_on_disk(tmp_path: Path, sections: dict[str, Any], words: str) -> None:
    with pytest.raises(HoldfastError) as error:
        begin(tmp_path / "out", **sections)
    assert words in one_line(error) and not list(tmp_path.iterdir())


def test_a_model_that_fails_leaves_nothing_on_disk(tmp_path: Path) -> None:
    from holdfast.models.own_module import Model

    with pytest.raises(Exception, match="mat1 and mat2"):
        begin(
            tmp_path / "out",
            model=Model(lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 10)), head=None),
        )
    assert not list(tmp_path.iterdir())


# ---- one run, one process


def test_a_directory_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    before = (tmp_path / "run" / "manifest.json").read_bytes()
    with pytest.raises(ConfigError) as error:
        begin(tmp_path / "run", seed=1)
    assert "already holds a run" in one_line(error) and "holdfast resume" in str(error.value)
    with pytest.raises(
        ConfigError, match="already holds a run"
    ):  # nor a sweep into it: its cells would hide the run, or it them
        session.start([("a", config()), ("b", config(seed=1))], tmp_path / "run")
    session.start([("a", config()), ("b", config(seed=1))], tmp_path / "sweep")
    with pytest.raises(ConfigError, match="already holds a run"):
        begin(tmp_path / "sweep")
    assert (tmp_path / "run" / "manifest.json").read_bytes() == before and not (
        tmp_path / "sweep" / "manifest.json"
    ).exists()


def test_a_directory_that_another_process_took_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two starts at once: both found the directory empty, one has played while the other was still
    measuring."""
    measure = planner._forecasts

    def slowly(*args: Any) -> Any:
        monkeypatch.setattr(planner, "_forecasts", measure)
        begin(tmp_path / "run", seed=1)
        return measure(*args)

    monkeypatch.setattr(planner, "_forecasts", slowly)
    with pytest.raises(ConfigError, match="already holds a run"):
        begin(tmp_path / "run", seed=2)
    assert Run(tmp_path / "run").config.seed == 1


def _hold(path: Path, ready: Any, leave: Any) -> None:
    Store(path).open()
    ready.set()
    leave.wait(60)


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    fork = multiprocessing.get_context("fork")
    ready, leave = fork.Event(), fork.Event()
    other = fork.Process(target=_hold, args=(tmp_path / "run", ready, leave))
    other.start()
    assert ready.wait(60)
    try:
        with pytest.raises(RunError) as error:
            session.resume(tmp_path / "run")
        assert "in use by another process" in one_line(error)
        assert len(Run(tmp_path / "run").metrics) == 2, "reading needs no lock"
        fresh = tmp_path / "fresh"
        Store(fresh).open()  # never closed: this process has it
        with pytest.raises(RunError, match="in use by another process"):
            begin(fresh)
        assert fresh.exists()
    finally:
        other.kill()  # not a clean end: the lock goes with the process all the same
        other.join()
    assert session.resume(tmp_path / "run")[0]["rounds"] == 2


# ---- the manifest


def test_plan_rows_and_threads_come_from_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `auto`, a resumed run does not measure again: the faster plan might be another one today."""
    said: list[str] = []
    begin(tmp_path / "run", RunCallbacks(say=said.append), engine={"plan": "auto", "memory": "300KB"})
    assert len(said) == 1 and said[0].startswith("plan ")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (
        manifest["plan"]["name"] in ("loop", "vmap")
        and 1 <= manifest["plan"]["rows"] < 100
        and manifest["threads"] == 1
    )
    (tmp_path / "run" / "result.json").unlink()
    manifest["plan"] |= {"name": "vmap", "rows": 3}
    manifest["threads"] = 2
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
    seen = []
    exchange = Simulator.exchange

    def look(self: Simulator, calls: Any) -> Any:
        seen.append((next(iter(self.plans.values())), torch.get_num_threads()))
        return exchange(self, calls)

    (tmp_path / "run" / "head.json").unlink()  # play it all again
    monkeypatch.setattr(Simulator, "exchange", look)
    monkeypatch.setattr(planner, "choosing", lambda *args: pytest.fail("measured again"))
    before = torch.get_num_threads()
    session.resume(tmp_path / "run")
    assert {(plan.name, plan.rows, threads) for plan, threads in seen} == {("vmap", 3, 2)}
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", "{}", '{"config": {}}', None])
def test_a_damaged_manifest_is_one_line(tmp_path: Path, content: str | None) -> None:
    begin(tmp_path / "run")
    file = tmp_path / "run" / "manifest.json"
    if content is None:  # all there, but a plan that cannot be
        content = json.dumps(json.loads(file.read_text()) | {"plan": {"nme": "loop"}})
    file.write_text(content)
    for use in (lambda: session.resume(tmp_path / "run"), lambda: Run(tmp_path / "run")):
        with pytest.raises(HoldfastError) as error:
            use()
        assert "manifest.json" in one_line(error)


def test_a_damaged_state_is_one_line(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    state = next((tmp_path / "run" / "state").iterdir())
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(RunError) as error:
        session.resume(tmp_path / "run")
    assert state.name in one_line(error)
    Store(tmp_path / "run").open().close()  # and the lock is free again


def test_runs_that_cannot_be_resumed_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="no run in"):
            session.resume(path)
    begin(tmp_path / "run")
    file = tmp_path / "run" / "manifest.json"
    manifest = json.loads(file.read_text())
    for name, words in (
        ("partition", "clients hold other samples"),
        ("samples", "the samples differ"),
        ("initial", "weights the run began with"),
    ):
        file.write_text(json.dumps(manifest | {name: "0" * 64}))
        with pytest.raises(RunError) as error:
            session.resume(tmp_path / "run")
        assert words in one_line(error)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_run_from_a_missing_device_is_refused_unless_asked(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    file = tmp_path / "run" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"device": "cuda"}))
    with pytest.raises(RunError) as error:
        session.resume(tmp_path / "run")
    assert "began on cuda" in one_line(error) and "--device cpu" in str(error.value)
    assert session.resume(tmp_path / "run", device="cpu")[0]["rounds"] == 2


def test_resuming_under_another_pytorch_is_reported(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    file = tmp_path / "run" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"torch": "1.0"}))
    said: list[str] = []
    session.resume(tmp_path / "run", RunCallbacks(say=said.append))
    assert len(said) == 1 and "1.0" in said[0] and "bits may differ" in said[0]


def test_plugins_are_named_but_never_loaded_by_themselves(tmp_path: Path, forget: None) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from holdfast import register\nfrom holdfast.methods.fedavg import FedAvg\n"
        "@register('method', 'mine-of-session')\nclass Mine(FedAvg):\n    '''Mine.'''\n"
    )
    from holdfast import load_plugin
    from holdfast.core import registry

    load_plugin(plugin)
    session.start([("", config(method="mine-of-session"))], tmp_path / "run")
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["plugins"] == [str(plugin)]
    assert Run(tmp_path / "run").config.parts().method.name == "mine-of-session"
    del registry._PARTS["method"]["mine-of-session"]  # as in a new process
    moved = plugin.rename(tmp_path / "moved.py")
    for look in (lambda: Run(tmp_path / "run").config, lambda: session.resume(tmp_path / "run")):
        with pytest.raises(ConfigError) as error:
            look()
        assert "unknown method 'mine-of-session'" in one_line(error) and str(plugin) in one_line(error)
        assert "if you trust them, pass --plugin FILE" in one_line(error)
    assert session.resume(tmp_path / "run", plugins=[str(moved)])[0]["rounds"] == 2
    assert Run(tmp_path / "run").model() is not None


def test_callbacks_follow_a_run(tmp_path: Path) -> None:
    planned, moved = [], []
    begin(
        tmp_path / "run",
        RunCallbacks(planned=planned.extend, moved=lambda e: moved.append(e.run_context.round)),
    )
    assert len(planned) == 1 and moved == sorted(moved) and moved[-1] == 2
