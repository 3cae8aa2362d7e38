"""Rounds that come back from workers: the directory is a sound sweep at all times, also after a kill between
any two files, and what is damaged is refused."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load, save

from holdfast.core.errors import RunError
from holdfast.core.files import as_json
from holdfast.experiment import build
from holdfast.experiment.config import Config, make_config
from holdfast.experiment.loop import Experiment
from holdfast.experiment.manifest import run_folders
from holdfast.storage.client_state import RowStore
from holdfast.storage.store import Store
from holdfast.sweeps.folder import SweepFolder
from holdfast.sweeps.grid import expand
from holdfast.sweeps.parcels import Files, of_folder, pack, unpack, write_files
from holdfast.sweeps.receiving import Receiver
from holdfast.sweeps.runner import Task, run_cells, sweep, take
from holdfast.sweeps.sending import ROWS, STATE, Sender
from tests.experiment.kills import bits, digits, in_child, table, was_killed, watched

Cells = list[tuple[str, Config]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "load_samples", lambda settings: digits())


def cells_of() -> Cells:
    """Two that are fused, with private rows of some of their clients, in three rounds."""
    grid = {**table("ditto"), "sweep": {"seed": [0, 1]}}
    return [(label, make_config(given)) for label, given in expand(grid)]


def trained(out: Path, cells: Cells, before: Files | None = None, interval: float = 0.0) -> list[Files]:
    """Train in a folder of its own, as a worker does, and return what it sends."""
    sent: list[Files] = []
    listed = SweepFolder.described(SweepFolder(out, cells).cells)
    write_files({"sweep.json": as_json(listed), **(before or {})}, out)
    folder = SweepFolder(out, cells)
    names = [place.path.name for place in folder.cells]
    sender = Sender(out, names, lambda files: sent.append(unpack(pack(files))), interval)
    run_cells(Task(folder, sender.watch(lambda line: None)), folder.cells)
    sender.send(names)
    return sent


def received(out: Path, cells: Cells, sent: list[Files]) -> None:
    """Write it back, as the process does that keeps the sweep."""
    task = Task(SweepFolder(out, cells))
    built = [Experiment(place.config, place.path, place.label, digits()) for place in task.folder.cells]
    with ExitStack() as locks:
        take(task, task.folder.cells, built, locks)
        receiver = Receiver(task.folder, task.experiments, {})
        for files in sent:
            receiver.receive(files, list(task.experiments))


def same(out: Path, whole: Path) -> None:
    """All that runs say and hold; where private rows lie in their file may differ."""
    for folder in run_folders(whole):
        mine, theirs = bits(out / folder.name), bits(folder)
        for one in (mine, theirs):
            one.pop("state/rows/index")
        assert mine == theirs, folder.name


def sound(out: Path) -> list[int | None]:
    """What storage/store.py promises: every head names a state that is there, with its rows and rounds."""
    rounds: list[int | None] = []
    for folder in sorted(path for path in out.glob("[0-9]*") if path.is_dir()):
        store = Store(folder)
        head = store.head()
        rounds.append(None if head is None else head[0])
        if head is not None:
            rows = RowStore(folder / "rows", head[1]["rows/index"])
            rows.read(head[1]["rows/index"][:, 0])
            assert [part["round"] for part in store.parts(head[0])] == list(range(1, head[0] + 1))
            assert (folder / "manifest.json").exists() and list(out.glob("groups/*.json"))
    return rounds


def test_what_comes_back_equals_a_sweep_on_one_machine(tmp_path: Path) -> None:
    cells = cells_of()
    sweep(cells, tmp_path / "whole")
    received(tmp_path / "back", cells, trained(tmp_path / "worker", cells))
    same(tmp_path / "back", tmp_path / "whole")
    at_the_end = trained(tmp_path / "once", cells, interval=1e9)
    assert len(at_the_end) == 2, "on which terms they begin, and their end"
    received(tmp_path / "late", cells, at_the_end)
    for folder in run_folders(tmp_path / "whole"):
        assert bits(tmp_path / "late" / folder.name) == bits(folder), "in one piece also the places are equal"
        assert json.loads((tmp_path / "late" / folder.name / "result.json").read_text())["run_dir"] == str(
            tmp_path / "late" / folder.name
        )


def test_only_changed_private_rows_travel(tmp_path: Path) -> None:
    """Three of five clients take part in a round, so no later parcel has more rows than that."""
    sent = trained(tmp_path / "worker", cells_of())
    ids = [len(load(files[name])["ids"]) for files in sent for name in files if name.endswith(ROWS)]
    assert len(ids) >= 4 and max(ids[2:]) <= 3


def test_a_worker_that_was_lost_is_continued_by_another(tmp_path: Path) -> None:
    cells = cells_of()
    sweep(cells, tmp_path / "whole")
    sent = trained(tmp_path / "first", cells)
    some = next(n for n, files in enumerate(sent) if any(name.endswith("000002.json") for name in files))
    received(tmp_path / "back", cells, sent[:some])
    begun = sound(tmp_path / "back")
    assert begun == [1, 1], "the second round was lost"
    names = [path.name for path in run_folders(tmp_path / "back")]
    files = of_folder(tmp_path / "back", names, "groups/000.json")
    again = trained(tmp_path / "second", cells, files)
    rounds = {name.rpartition("/")[2] for files in again for name in files if "/parts/" in name}
    assert "000002.json" in rounds and "000001.json" not in rounds
    received(tmp_path / "back", cells, again)
    same(tmp_path / "back", tmp_path / "whole")


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.long])])
def test_a_kill_between_any_two_files_leaves_a_sound_sweep(
    tmp_path: Path, every: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells, seen = cells_of(), list[str]()
    sweep(cells, tmp_path / "whole")
    sent = trained(tmp_path / "worker", cells)
    with watched(seen.append):
        received(tmp_path / "counted", cells, sent)
    reached = set[tuple[int | None, ...]]()
    for event in range(0, len(seen), 1 if every else 17):
        out = tmp_path / f"{event}"
        assert was_killed(in_child(lambda out=out, event=event: _die(event, out, cells, sent)))  # type: ignore[misc]
        reached.add(tuple(sound(out)))
        statuses = sweep(cells, out)
        assert [status.status for status in statuses] == ["finished"] * 2, (event, seen[event])
        same(out, tmp_path / "whole")
    assert {(None, None), (1, 1)} <= reached


def _die(event: int, out: Path, cells: Cells, sent: list[Files]) -> None:
    count = 0

    def strike(_name: str) -> None:
        nonlocal count
        if count == event:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    with watched(strike):
        received(out, cells, sent)


def _state(files: Files) -> str:
    return next(name for name in files if name.endswith(STATE))


def _without_rows(files: Files) -> Files:
    return {name: content for name, content in files.items() if not name.endswith(ROWS)}


def _cut(files: Files) -> Files:
    return {**files, _state(files): files[_state(files)][:-10]}


def _skipped(files: Files) -> Files:
    return {name.replace("000001", "000002"): content for name, content in files.items()}


def _foreign(files: Files) -> Files:
    return {**files, "../outside.json": b"{}"}


def _far_record(files: Files) -> Files:
    state = load(files[_state(files)])
    state["rows/index"][0, 1] = 10**9
    return {**files, _state(files): save(state)}


@pytest.mark.parametrize(
    "change, words",
    [
        (_without_rows, "without the private rows"),
        (_cut, "cannot be read"),
        (_skipped, "damaged 'round'"),
        (_foreign, "which it was not given"),
        (_far_record, "damaged"),
    ],
)
def test_what_is_damaged_is_refused_and_changes_nothing(
    tmp_path: Path, change: Callable[[Files], Files], words: str
) -> None:
    cells = cells_of()
    sent = trained(tmp_path / "worker", cells)
    first = next(n for n, files in enumerate(sent) if any(name.endswith("000001.json") for name in files))
    received(tmp_path / "back", cells, sent[:first])
    before = sound(tmp_path / "back")
    with pytest.raises(RunError, match=words) as error:
        received(tmp_path / "back", cells, [change(sent[first])])
    assert "\n" not in str(error.value)
    assert sound(tmp_path / "back") == before and not (tmp_path / "outside.json").exists()


def test_a_round_that_is_missing_is_noticed(tmp_path: Path) -> None:
    cells = cells_of()
    sent = trained(tmp_path / "worker", cells)
    second = next(n for n, files in enumerate(sent) if any(name.endswith("000002.json") for name in files))
    received(tmp_path / "back", cells, sent[: second - 1])
    with pytest.raises(RunError, match="is the next"):
        received(tmp_path / "back", cells, [sent[second]])


GOOD = pack({"a": b"1"})


@pytest.mark.parametrize("block", [b"", b"\x05", GOOD[:-1], GOOD + b"1", b"\xff" * 40, b"\0" * 8 + b"[1]"])
def test_a_damaged_block_is_one_line(block: bytes) -> None:
    with pytest.raises(RunError, match="cannot be read"):
        unpack(block)


def test_files_cannot_leave_their_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="leads out"):
        write_files({"../x": b""}, tmp_path / "in")
    assert unpack(pack({"a/b": b"12", "c": b""})) == {"a/b": b"12", "c": b""}


def test_a_plug_in_of_a_worker_has_the_path_of_this_machine_in_the_manifest(tmp_path: Path) -> None:
    cells = cells_of()
    sent = trained(tmp_path / "worker", cells, interval=1e9)
    for files in sent:
        for name in [name for name in files if name.endswith("manifest.json")]:
            manifest = json.loads(files[name])
            files[name] = json.dumps(manifest | {"plugins": [f"/elsewhere/{'a' * 64}/mine.py"]}).encode()
    task = Task(SweepFolder(tmp_path / "back", cells))
    built = [Experiment(place.config, place.path, place.label, digits()) for place in task.folder.cells]
    own = {"a" * 64: "/here/mine.py"}
    with ExitStack() as locks:
        take(task, task.folder.cells, built, locks)
        for files in sent:
            Receiver(task.folder, task.experiments, own).receive(files, list(task.experiments))
    for folder in run_folders(tmp_path / "back"):
        assert json.loads((folder / "manifest.json").read_text())["plugins"] == ["/here/mine.py"]
