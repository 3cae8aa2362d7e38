"""Trackers receive what is committed, once and in order; and whatever they do, the run is what it would have
been without them."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.cli import main
from holdfast.core.errors import ConfigError
from holdfast.experiment.runner import RunCallbacks
from holdfast.results.run import Run
from holdfast.storage.store import Store
from holdfast.tracking import KnownRun, chosen, following
from holdfast.tracking.base import Figures, harmless, numbers, settings

TINY: dict[str, Any] = {
    "method": {"name": "fedavg"},
    "data": {"clients": 3, "partition": {"name": "dirichlet", "beta": 0.5, "samples_per_client": 20}},
    "train": {"rounds": 3, "local_epochs": 1},
    "engine": {"plan": "loop", "threads": 1, "workers": 1},
}


@pytest.fixture(autouse=True)
def quick(quick_disk: None) -> None:
    pass


class Diary:
    """A tracker of the user that records its calls."""

    books: list[Diary] = []

    def __init__(self) -> None:
        self.begun: tuple[Any, ...] = ()
        self.rounds: list[int] = []
        self.figures: list[Figures] = []
        self.ends: list[Figures | None] = []
        self.where = "a diary"
        Diary.books.append(self)

    def begin(self, config: Mapping[str, Any], folder: Path, label: str, known: KnownRun | None) -> str:
        self.begun = (dict(config), folder, label, known)
        return "volume one"

    def round(self, round: int, figures: Figures) -> None:
        self.rounds.append(round)
        self.figures.append(figures)

    def end(self, final: Figures | None) -> None:
        self.ends.append(final)


@pytest.fixture(autouse=True)
def empty_shelf() -> Iterator[None]:
    Diary.books = []
    yield


def broken(where: str, error: type[BaseException] = RuntimeError) -> type[Diary]:
    """A tracker that fails at one point."""

    class Broken(Diary):
        def _fail(self, *args: Any) -> Any:
            raise error("the server at http://me:hunter2@tracker is away")

    setattr(Broken, where, Broken._fail)
    return Broken


def kept(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "tracking.json").read_text())


def bits(folder: Path) -> list[bytes]:
    return [
        path.read_bytes()
        for part in ("state", "parts")
        for path in sorted((folder / part).glob("*.safetensors"))
    ]


def killed_after(last: int, monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> None:
    plain = Store.commit

    def stop(self: Store, round: int) -> None:
        plain(self, round)
        if round == last:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):  # holdfast.run returns what there is
        patch.setattr(Store, "commit", stop)
        run()


def test_trackers_receive_rounds_and_end_and_do_not_change_the_bits(tmp_path: Path) -> None:
    run = holdfast.run(TINY, out=tmp_path / "logged", track=[Diary])
    (diary,) = Diary.books
    config, folder, label, known = diary.begun
    assert (
        (folder, label, known) == (tmp_path / "logged", "logged", None)
        and config["train.rounds"] == 3
        and config["method.name"] == "fedavg"
    )
    assert (
        diary.rounds == [1, 2, 3]
        and [f["accuracy"] for f in diary.figures] == run.metrics["accuracy"].tolist()
    )
    assert "seconds/client" in diary.figures[0]
    assert diary.ends == [numbers(run.final)] and kept(run.path) == {
        "Diary": {"id": "volume one", "round": 3, "ended": True}
    }
    alone = holdfast.run(TINY, out=tmp_path / "alone")
    assert bits(run.path) == bits(alone.path) and not (alone.path / "tracking.json").exists()
    assert run.manifest["config"] == alone.manifest["config"]


@pytest.mark.parametrize("where", ["begin", "round", "end"])
@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_failing_tracker_is_switched_off_and_the_run_continues(
    tmp_path: Path, where: str, error: type[BaseException]
) -> None:
    said: list[str] = []
    run = holdfast.run(
        TINY, out=tmp_path / "run", watch=RunCallbacks(say=said.append), track=[broken(where, error), Diary]
    )
    complaints = [line for line in said if "failed and is switched off" in line]
    assert (
        len(complaints) == 1 and complaints[0].startswith("Broken failed") and error.__name__ in complaints[0]
    )
    assert "hunter2" not in complaints[0] and "http://***@tracker" in complaints[0]
    diary = next(book for book in Diary.books if type(book) is Diary)
    assert run.final["accuracy"] is not None and diary.rounds == [1, 2, 3] and len(diary.ends) == 1


def test_a_killed_run_continues_in_the_same_tracker_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 2 was committed but not sent: it is sent after the resume, and no round twice."""
    killed_after(2, monkeypatch, lambda: holdfast.run(TINY, out=tmp_path / "run", track=[Diary]))
    first = Diary.books[0]
    assert first.rounds == [1] and first.ends == [None]
    assert kept(tmp_path / "run")["Diary"] == {"id": "volume one", "round": 1, "ended": False}
    holdfast.resume(tmp_path / "run", track=[Diary])
    second = Diary.books[1]
    assert second.begun[3] == KnownRun("volume one", 1) and second.rounds == [2, 3]
    assert second.ends == [numbers(Run(tmp_path / "run").final)] and kept(tmp_path / "run")["Diary"]["ended"]
    holdfast.resume(tmp_path / "run", track=[Diary])
    assert len(Diary.books) == 2  # everything was sent


def test_a_tracker_added_on_resume_receives_all_rounds(tmp_path: Path) -> None:
    holdfast.run(TINY, out=tmp_path / "run")
    holdfast.resume(tmp_path / "run", track=[Diary])
    assert Diary.books[0].rounds == [1, 2, 3] and len(Diary.books[0].ends) == 1


def test_a_damaged_tracking_file_is_ignored(tmp_path: Path) -> None:
    holdfast.run(TINY, out=tmp_path / "run")
    (tmp_path / "run" / "tracking.json").write_text("{")
    holdfast.resume(tmp_path / "run", track=[Diary])
    assert Diary.books[0].rounds == [1, 2, 3] and kept(tmp_path / "run")["Diary"]["round"] == 3


def test_every_cell_of_a_sweep_is_a_run_of_its_own(tmp_path: Path) -> None:
    holdfast.sweep({**TINY, "sweep": {"method.name": ["fedavg", "local"]}}, out=tmp_path / "s", track=[Diary])
    assert {book.begun[2]: book.rounds for book in Diary.books} == {"fedavg": [1, 2, 3], "local": [1, 2, 3]}
    assert all(len(book.ends) == 1 and book.ends[0] for book in Diary.books)


def test_a_hanging_tracker_delays_the_end_only_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_PATIENCE", 0.05)
    gate, said = threading.Event(), []

    class Stuck(Diary):
        def round(self, round: int, figures: Figures) -> None:
            gate.wait(120)

    try:
        run = holdfast.run(TINY, out=tmp_path / "run", watch=RunCallbacks(say=said.append), track=[Stuck])
        assert run.final["accuracy"] is not None and any("still busy" in line for line in said)
    finally:
        gate.set()


def test_a_run_that_fails_to_start_reports_no_tracker_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    watch = RunCallbacks(say=said.append)
    monkeypatch.setattr(Store, "commit", lambda self, round: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        holdfast.run(TINY, out=tmp_path / "run", watch=watch, track=[Diary])
    assert not (tmp_path / "run").exists() and not any("failed" in line for line in said)


def test_tracker_names_are_checked_before_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unknown tracker 'wandbb'; did you mean 'wandb'"):
        chosen(["wandbb"])
    with pytest.raises(ConfigError, match="give a list"):
        chosen("wandb")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"mlflow is not installed; pip install 'holdfast\[mlflow\]'"):
        chosen(["mlflow"])


def test_trackers_receive_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcdef123456")
    assert (
        harmless("key abcdef123456 refused by https://a:b@host/x") == "key *** refused by https://***@host/x"
    )
    assert settings({"data": {"name": "x", "options": {"token": "t"}}, "attack": None}) == {"data.name": "x"}
    assert numbers({"a": 1, "b": None, "c": float("nan"), "d": "x", "e": 0.5}) == {"a": 1.0, "e": 0.5}


def stub(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    for variable in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    runs: list[Any] = []

    class Fake:
        def __init__(self, **given: Any):
            self.given, self.id, self.url = given, given["id"] or f"id{len(runs)}", "https://wandb/run"
            self.logged: list[tuple[int, Figures]] = []
            self.summary: dict[str, float] = {}
            self.code: int | None = None
            runs.append(self)

        def log(self, figures: Figures, step: int) -> None:
            self.logged.append((step, figures))

        def finish(self, exit_code: int) -> None:
            self.code = exit_code

    stub(monkeypatch, "wandb", init=lambda **given: Fake(**given), Settings=lambda **given: given)
    return runs


def test_wandb_records_a_run(tmp_path: Path, fake_wandb: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    killed_after(3, monkeypatch, lambda: holdfast.run(TINY, out=tmp_path / "run", track=["wandb"]))
    run = holdfast.resume(tmp_path / "run", watch=RunCallbacks(say=said.append), track=["wandb"])
    assert isinstance(run, Run)
    first, second = fake_wandb
    assert [first.given[name] for name in ("mode", "id", "resume", "dir")] == [
        "offline",
        None,
        None,
        str(tmp_path / "run"),
    ]
    assert (
        first.given["project"] == "holdfast"
        and first.given["name"] == "run"
        and first.given["group"] is None
        and first.code == 1
    )
    assert (second.given["id"], second.given["resume"], second.code) == ("id0", "allow", 0)
    assert [step for step, _ in [*first.logged, *second.logged]] == [1, 2, 3]
    assert second.summary["final/accuracy"] == run.final["accuracy"] and any(
        "offline" in line for line in said
    )
    monkeypatch.setenv("WANDB_API_KEY", "abcdef123456")
    holdfast.sweep({**TINY, "sweep": {"seed": [0]}}, out=tmp_path / "s", track=["wandb"])
    assert fake_wandb[2].given["mode"] == "online" and fake_wandb[2].given["group"] == "s"


def test_mlflow_records_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    for variable in (
        "MLFLOW_HTTP_REQUEST_TIMEOUT",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES",
        "MLFLOW_DISABLE_TELEMETRY",
    ):
        monkeypatch.setenv(variable, "1")  # so that what is set here is undone
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    class Client:
        def __getattr__(self, name: str) -> Any:
            def call(*args: Any, **named: Any) -> Any:
                calls.append((name, args, named))
                if name == "create_run":
                    return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
                return None if name == "get_experiment_by_name" else "e1"

            return call

    stub(monkeypatch, "mlflow", MlflowClient=Client, get_tracking_uri=lambda: "http://me:hunter2@host")
    stub(monkeypatch, "mlflow.entities", Metric=lambda *about: about, Param=lambda *about: about)
    said: list[str] = []
    killed_after(
        3,
        monkeypatch,
        lambda: holdfast.run(
            TINY, out=tmp_path / "run", watch=RunCallbacks(say=said.append), track=["mlflow"]
        ),
    )
    run = holdfast.resume(tmp_path / "run", track=["mlflow"])
    assert isinstance(run, Run)
    names = [name for name, _, _ in calls if name != "log_batch"]
    assert names == [
        "get_experiment_by_name",
        "create_experiment",
        "create_run",
        "set_terminated",
        "update_run",
        "set_terminated",
    ]
    assert [named["status"] for name, _, named in calls if name == "set_terminated"] == ["KILLED", "FINISHED"]
    params = dict(pair for name, _, named in calls if name == "log_batch" for pair in named.get("params", []))
    assert params["method.name"] == "fedavg" and params["train.rounds"] == "3"
    logged = [
        metric for name, _, named in calls if name == "log_batch" for metric in named.get("metrics", [])
    ]
    expected = [(value, round) for round, value in enumerate(run.metrics["accuracy"], start=1)]
    assert [(value, step) for name, value, _, step in logged if name == "accuracy"] == expected
    assert [(value, step) for name, value, _, step in logged if name == "final/accuracy"] == [
        (run.final["accuracy"], 3)
    ]
    assert "mlflow: run r1 in http://***@host" in said


def test_tensorboard_event_files_hold_the_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    killed_after(2, monkeypatch, lambda: holdfast.run(TINY, out=tmp_path / "run", track=["tensorboard"]))
    run = holdfast.resume(tmp_path / "run", track=["tensorboard"])
    assert isinstance(run, Run)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    logged = events.Scalars("accuracy")
    assert [event.step for event in logged] == [1, 2, 3]
    assert [event.value for event in logged] == pytest.approx(run.metrics["accuracy"].tolist())
    (final,) = events.Scalars("final/accuracy")
    assert (
        final.step == 3
        and final.value == pytest.approx(run.final["accuracy"])
        and "config/text_summary" in events.Tags()["tensors"]
    )


def test_the_track_option_of_run(
    tmp_path: Path, fake_wandb: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [
        f"{section}.{key}={value}" for section in ("train", "engine") for key, value in TINY[section].items()
    ]
    args = [arg for change in ["data.clients=3", *changes] for arg in ("--set", change)]
    with pytest.raises(SystemExit) as left:
        main(["run", *args, "--out", str(tmp_path / "run"), "--track", "wandb", "--json"])
    said = capsys.readouterr()
    assert left.value.code == 0 and json.loads(said.out)["rounds"] == 3 and len(fake_wandb[0].logged) == 3
    with pytest.raises(SystemExit) as left:
        main(["run", *args, "--out", str(tmp_path / "other"), "--track", "tensorbord"])
    assert (
        left.value.code == 2
        and "did you mean 'tensorboard'" in capsys.readouterr().err
        and not (tmp_path / "other").exists()
    )


@pytest.mark.parametrize("command", ["reproduce", "tune"])
def test_the_track_option_of_commands_that_run_sweeps(
    command: str, tmp_path: Path, fake_wandb: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of tuning, only the runs of the report are tracked, not the trials."""
    changes = [arg for key, value in TINY["engine"].items() for arg in ("--set", f"engine.{key}={value}")]
    config = tmp_path / "config.toml"
    config.write_text(
        "[data]\nclients = 3\nsplit = { train = 0.6, validation = 0.2, test = 0.2 }\n"
        'partition = { name = "dirichlet", beta = 0.5, samples_per_client = 20 }\n'
        '[train]\nrounds = 2\nlocal_epochs = 1\n[sweep]\nseed = [0]\n[tune]\n"train.lr" = [0.1, 0.2]\n'
    )
    one = ["fedcap", "table-1", "--scale", "smoke", "--only", "method=Mean"]
    args = {"reproduce": one, "tune": [str(config), "--budget", "2"]}[command]
    with pytest.raises(SystemExit) as left:
        main([command, *args, *changes, "--out", str(tmp_path / "out"), "--track", "wandb", "--json"])
    said = capsys.readouterr()
    assert left.value.code == 0 and json.loads(said.out)
    assert [[step for step, _ in run.logged] for run in fake_wandb] == [[1, 2]]
    with pytest.raises(SystemExit) as left:
        main([command, *args, "--out", str(tmp_path / "other"), "--track", "wandbb"])
    assert left.value.code == 2 and not (tmp_path / "other").exists()
