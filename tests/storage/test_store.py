"""The store: private rows against a plain dict, commits, damage, a full disk."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.errors import HoldfastError, RunError, StoreError
from holdfast.core.files import write_atomically
from holdfast.core.reading import read_json
from holdfast.storage import client_state as rows_module
from holdfast.storage import store as store_module
from holdfast.storage.client_state import RowStore
from holdfast.storage.store import Store, commit_all, write_tensors
from holdfast.storage.write_behind import WriteBehind

WIDTH = 7


def on_one_thread(work: Any, items: Any) -> Any:
    return [work(item) for item in items]


def rows_of(ids: list[int], stamp: float) -> dict[str, torch.Tensor]:
    """Rows that tell whose they are and when they were written."""
    ids_ = torch.tensor(ids, dtype=torch.float32)
    return {
        "personal": ids_[:, None] + torch.arange(WIDTH) / 10 + stamp,
        "seen": torch.tensor(ids) * 1000 + int(stamp),
        "mask": torch.tensor(ids)[:, None] % 2 == torch.tensor([[0, 1]]),
        "half": (ids_[:, None, None] * torch.ones(1, 2, 3)).to(torch.bfloat16),
    }


def assert_rows(rows: RowStore, model: dict[int, dict[str, torch.Tensor]]) -> None:
    ids = torch.tensor(sorted(model), dtype=torch.int64)
    if not len(ids):
        assert not rows.place and not rows.staged and not rows.pending
        return
    assert bool(rows.present(ids).all())
    found = rows.read(ids.flip(0))  # in any order
    for name in next(iter(model.values())):
        wanted = torch.stack([model[int(c)][name] for c in ids.flip(0)])
        assert found[name].dtype == wanted.dtype and torch.equal(found[name], wanted), name


@pytest.mark.parametrize("seed", range(8))
def test_rows_behave_like_a_dict(tmp_path: Path, seed: int) -> None:
    """Random stages, commits here and in another thread, abandoned rounds and restarts: what is read is what
    a dict would hold, and the file stays small."""
    chance = random.Random(seed)
    rows, index = RowStore(tmp_path), None
    committed: dict[int, dict[str, torch.Tensor]] = {}
    working: dict[int, dict[str, torch.Tensor]] = {}
    most = 0
    for stamp in range(120):
        action = chance.choices(["stage", "commit", "behind", "abandon", "restart"], [6, 2, 2, 1, 1])[0]
        if action == "stage":
            ids = sorted(
                chance.sample([-1, *range(30)], chance.randint(1, 6))
            )  # -1: the server's pseudo-client
            state = rows_of(ids, float(stamp))
            rows.stage(torch.tensor(ids), state)
            working |= {
                client: {name: value[i] for name, value in state.items()} for i, client in enumerate(ids)
            }
            most = max(most, len(rows.staged))
        elif action in ("commit", "behind"):
            index = rows.index()
            assert index[:, 0].tolist() == sorted(working)
            if rows.on_its_way is not None:
                rows.settle()
            if action == "commit":
                rows.settle()
            else:  # done by the time the next rows are staged
                commit: Future[None] = Future()
                commit.set_result(None)
                rows.hand_over(commit)
            committed = dict(working)
        else:
            rows = rows if action == "abandon" else RowStore(tmp_path, index)
            rows.begin()
            working = dict(committed)
        assert_rows(rows, working)
        used = [*rows.place.values(), *rows.pending.values(), *rows.staged.values()]
        assert len(set(used)) == len(used), "a staged row never shares a record with a committed one"
        record = WIDTH * 4 + 8 + 2 + 12
        size = (tmp_path / "records").stat().st_size if rows.staged or committed else 0
        assert size <= (len(committed) + most) * record, "live rows and one round's more"
    assert_rows(RowStore(tmp_path, index), committed)


def test_rows_wait_for_the_commit_of_the_round_before(tmp_path: Path) -> None:
    """They are read meanwhile; new rows take the records that the commit sets free, and no others."""
    rows, ids = RowStore(tmp_path), torch.arange(3)
    for stamp in range(2):
        rows.stage(ids, rows_of([0, 1, 2], stamp))
        commit: Future[None] = Future()
        rows.hand_over(commit)
        rows.begin()
        rows.keep()
        rows.restore()
        assert rows.present(torch.arange(4)).tolist() == [True, True, True, False]
        assert rows.read(ids)["seen"].tolist() == [stamp, 1000 + stamp, 2000 + stamp]
        threading.Timer(0.05, commit.set_result, [None]).start()
    rows.stage(ids, rows_of([0, 1, 2], 2))
    assert (commit.done(), rows.place, rows.staged) == (True, {0: 3, 1: 4, 2: 5}, {0: 0, 1: 1, 2: 2})
    failed: Future[None] = Future()
    rows.hand_over(failed)
    failed.set_exception(StoreError("the disk is full"))
    with pytest.raises(StoreError, match="the disk is full"):
        rows.stage(ids, rows_of([0, 1, 2], 3))
    assert rows.place == {0: 3, 1: 4, 2: 5}, "what is not committed does not count"


def test_the_second_row_of_a_round_replaces_the_first(tmp_path: Path) -> None:
    rows = RowStore(tmp_path)
    for stamp in range(5):
        rows.stage(torch.tensor([3]), rows_of([3], stamp))
    assert rows.read(torch.tensor([3]))["seen"].tolist() == [3004] and list(rows.staged.values()) == [0]


def test_nothing_is_stored_of_clients_without_state(tmp_path: Path) -> None:
    rows = RowStore(tmp_path)
    rows.stage(torch.tensor([1, 2]), {})
    rows.stage(torch.tensor([], dtype=torch.int64), rows_of([], 0))
    assert (
        rows.index().shape == (0, 2)
        and rows.read(torch.tensor([], dtype=torch.int64)) == {}
        and not list(tmp_path.iterdir())
    )


def test_a_row_may_hold_nothing_under_a_name(tmp_path: Path) -> None:
    rows = RowStore(tmp_path)
    rows.stage(
        torch.tensor([3, 5]),
        {"a": torch.tensor([[1.0], [2.0]]), "none": torch.zeros(2, 0, dtype=torch.float64)},
    )
    found = rows.read(torch.tensor([5, 3]))
    assert found["a"].tolist() == [[2.0], [1.0]] and found["none"].shape == (2, 0)


def test_rows_of_another_shape_are_refused(tmp_path: Path) -> None:
    rows = RowStore(tmp_path)
    rows.stage(torch.tensor([1]), {"own": torch.zeros(1, 4)})
    for other in (
        {"own": torch.zeros(1, 5)},
        {"own": torch.zeros(1, 4).double()},
        {"mine": torch.zeros(1, 4)},
    ):
        with pytest.raises(RunError, match="other fields or shapes"):
            rows.stage(torch.tensor([2]), other)


@pytest.mark.parametrize("damage", ["records", "fields", "short"])
def test_damaged_rows_are_an_error_of_one_line(tmp_path: Path, damage: str) -> None:
    rows = RowStore(tmp_path)
    rows.stage(torch.tensor([0, 1]), rows_of([0, 1], 0))
    index = rows.index()
    if damage == "fields":
        (tmp_path / "fields.json").write_text("{}")
    elif damage == "records":
        (tmp_path / "records").unlink()
    else:
        os.truncate(tmp_path / "records", 60)
    with pytest.raises(RunError) as error:
        RowStore(tmp_path, index).read(torch.tensor([0, 1]))
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_a_commit_is_quick_with_many_clients(tmp_path: Path) -> None:
    """10,000 rows on disk, 50 new ones: the work beside fsync is a few milliseconds, not one per client."""
    rows = RowStore(tmp_path / "rows")
    store = Store(tmp_path).open()
    rows.stage(torch.arange(10_000), {"own": torch.zeros(10_000, 50)})
    commit_all([store.prepare(0, {}, {}, {}, rows)])
    best = float("inf")
    for round in range(1, 6):
        started = time.process_time()
        ids = torch.arange(50) * 200 + round
        rows.begin()
        rows.read(ids)
        rows.stage(ids, {"own": torch.full((50, 50), float(round))})
        commit_all([store.prepare(round, {"server/model": torch.zeros(1000)}, {"round": round}, {}, rows)])
        best = min(best, time.process_time() - started)
    store.close()
    assert best < 0.05


def test_rows_are_read_into_a_part_of_something_larger(tmp_path: Path) -> None:
    rows = RowStore(tmp_path)
    rows.stage(torch.arange(6), rows_of(list(range(6)), 0.5))
    whole = rows.room(5)
    rows.read(torch.tensor([4, 1]), {name: value[1:3] for name, value in whole.items()})
    wanted = rows.read(torch.tensor([4, 1]))
    assert set(whole) == set(wanted) and all(torch.equal(whole[name][1:3], wanted[name]) for name in whole)
    with pytest.raises(RunError, match="other fields or shapes"):
        rows.read(torch.tensor([4, 1]), {name: value[1:4] for name, value in whole.items()})
    for wrong in ({"personal": whole["personal"][:1].double()}, {**rows.room(1), "more": torch.zeros(1)}):
        with pytest.raises(RunError, match="other fields or shapes"):
            rows.read(torch.tensor([4]), wrong)


@pytest.mark.parametrize("most", [1, 5, 8, 1 << 20])
def test_rows_are_read_on_where_the_system_gives_less_than_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    rows, all_at_once = RowStore(tmp_path), os.preadv
    rows.stage(torch.arange(4), rows_of(list(range(4)), 0.5))
    wanted = rows.read(torch.arange(4))

    def preadv(handle: int, buffers: list[memoryview], place: int) -> int:
        taken = bytearray(most)
        got = all_at_once(handle, [memoryview(taken)[: sum(map(len, buffers))]], place)
        left = memoryview(taken)[:got]
        for buffer in buffers:
            buffer[: len(left)] = left[: len(buffer)]
            left = left[len(buffer) :]
        return got

    monkeypatch.setattr(os, "preadv", preadv)
    found = rows.read(torch.arange(4))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_row_of_very_many_fields(tmp_path: Path) -> None:
    rows = RowStore(tmp_path)
    rows.stage(torch.arange(2), {f"f{i:04}": torch.tensor([i, -i]) for i in range(1100)})
    assert [value.tolist() for value in rows.read(torch.arange(2)).values()] == [[i, -i] for i in range(1100)]


MEMORY = """
import resource, sys, torch
from pathlib import Path
from holdfast.storage.client_state import RowStore
rows = RowStore(Path(sys.argv[1]))
width = 50_000
def go(rounds, clients):
    for r in range(rounds):
        ids = torch.arange(20) + (20 * r) % clients
        rows.begin()
        known = rows.present(ids)
        if bool(known.any()):
            rows.read(ids[known])
        rows.stage(ids, {"own": torch.full((20, width), float(r))})
        rows.index(); rows.settle()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = go(20, 100)
after = go(160, 1600)  # 320 MB of rows
print(after - before)
"""


def test_memory_stays_flat_however_many_rows(tmp_path: Path) -> None:
    grown = float(
        subprocess.run(
            [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True
        ).stdout
    )
    assert grown < 40, f"{grown:.0f} MB more after 320 MB of rows"


# ---- commits


def commit(store: Store, round: int, rows: RowStore | None = None, **state: torch.Tensor) -> None:
    part = {"round": round, "metrics": {"accuracy": 0.5}}
    commit_all(
        [
            store.prepare(
                round, state, part, {"cohort": torch.arange(round)}, rows or RowStore(store.path / "rows")
            )
        ]
    )


def test_the_head_is_the_last_commit(tmp_path: Path) -> None:
    store = Store(tmp_path).open()
    assert store.head() is None
    for round in range(4):
        commit(store, round, model=torch.full((3,), float(round)))
    head = store.head()
    assert head is not None and head[0] == 3 and torch.equal(head[1]["model"], torch.full((3,), 3.0))
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["000003.safetensors"], "old states disappear"
    assert [part["round"] for part in store.parts(3)] == [1, 2, 3] and store.arrays(2)["cohort"].tolist() == [
        0,
        1,
    ]
    assert store.arrays(99) == {}
    store.close()


def test_one_tensor_under_two_names_can_be_saved(tmp_path: Path) -> None:
    """safetensors refuses tensors that share memory; a method may well keep one under two names, or a
    view."""
    x = torch.arange(6.0).view(2, 3)
    write_tensors(
        tmp_path / "x.safetensors",
        {"a": x, "b": x, "row": x[0], "turned": x.T, "none": torch.zeros(0, 3), "scalar": x[0, 1]},
    )
    found = store_module.read_tensors(tmp_path / "x.safetensors")
    assert (
        torch.equal(found["a"], found["b"])
        and torch.equal(found["turned"], x.T)
        and found["none"].shape == (0, 3)
    )
    assert found["scalar"].shape == () and float(found["scalar"]) == 1.0


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    Store(tmp_path).open().close()
    left = [tmp_path / ".head.json.123.writing", tmp_path / "state" / ".000001.safetensors.123.writing"]
    for file in left:
        file.write_text("half")
    Store(tmp_path).open().close()
    assert not any(file.exists() for file in left)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"\xff\xfe",
        b'{"round": 1}',
        b'{"round": "x", "state": "state/a"}',
        b'{"round": 1, "state": 5}',
        b'{"round": 1, "state": "state/none"}',
        b'{"round": 1, "state": "state"}',
    ],
)
def test_a_damaged_head_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "head.json").write_bytes(content)
    with pytest.raises(RunError) as error:
        Store(tmp_path).head()
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x10\0\0\0\0\0\0\0{}", b"\xff" * 64])
def test_a_damaged_state_is_one_line(tmp_path: Path, content: bytes) -> None:
    store = Store(tmp_path).open()
    commit(store, 0, model=torch.zeros(3))
    store.close()
    (tmp_path / "state" / "000000.safetensors").write_bytes(content)
    with pytest.raises(RunError) as error:
        store.head()
    assert "\n" not in str(error.value) and "000000.safetensors" in str(error.value)


def test_a_truncated_state_is_one_line(tmp_path: Path) -> None:
    store = Store(tmp_path).open()
    commit(store, 0, model=torch.zeros(300))
    store.close()
    whole = (tmp_path / "state" / "000000.safetensors").read_bytes()
    for length in (4, 50, len(whole) - 1):
        (tmp_path / "state" / "000000.safetensors").write_bytes(whole[:length])
        with pytest.raises(RunError):
            store.head()


def test_a_reader_that_meets_a_commit_reads_the_new_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers take no lock: between reading head.json and opening its state, a commit may have removed the
    state."""
    store = Store(tmp_path).open()
    commit(store, 1, model=torch.zeros(3))
    read = Store.read_json
    stale = [read(store, "head.json")]
    commit(store, 2, model=torch.ones(3))
    monkeypatch.setattr(Store, "read_json", lambda self, name: stale.pop() if stale else read(self, name))
    head = store.head()
    store.close()
    assert head is not None and head[0] == 2


# ---- the disk says no


@pytest.mark.parametrize(
    "number, words", [(errno.ENOSPC, "disk is full"), (errno.EDQUOT, "disk is full"), (errno.EACCES, "--out")]
)
def test_errors_of_the_disk_are_plain_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    write_atomically(tmp_path / "a", b"old")

    def full(_handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HoldfastError, match=words):
        write_atomically(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_rows_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = RowStore(tmp_path)
    rows.stage(torch.tensor([1]), {"own": torch.zeros(1, 4)})
    index = rows.index()
    rows.settle()

    def full(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rows_module, "open", full, raising=False)
    with pytest.raises(HoldfastError, match="disk is full"):
        rows.stage(torch.tensor([1]), {"own": torch.ones(1, 4)})
    monkeypatch.undo()
    assert RowStore(tmp_path, index).read(torch.tensor([1]))["own"].tolist() == [[0.0] * 4], (
        "the committed row is untouched"
    )


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(HoldfastError, match="choose another --out"):
        Store(tmp_path / "taken").open()


def test_a_second_process_cannot_open_a_locked_store(tmp_path: Path) -> None:
    first = Store(tmp_path).open()
    with pytest.raises(RunError, match="in use by another process"):
        Store(tmp_path).open()
    first.close()
    first.close()
    Store(tmp_path).open().close()


def test_json_has_no_nan(tmp_path: Path) -> None:
    store = Store(tmp_path).open()
    store.write_json("x.json", {"a": float("nan"), "b": [1.0, float("inf")], "c": {"d": (1, None)}})
    store.close()
    assert read_json(tmp_path / "x.json") == {"a": None, "b": [1.0, None], "c": {"d": [1, None]}}


# ---- exchanges that are taken back, and runs that are committed together


def test_a_failed_exchange_is_taken_back(tmp_path: Path) -> None:
    """Rows of an earlier exchange of the round are read again, and the records of what failed are used
    again."""
    rows, ids = RowStore(tmp_path), torch.arange(3)
    rows.stage(ids, {"own": torch.zeros(3, 2)})
    rows.settle()
    for attempt in range(4):
        rows.begin()
        rows.keep()
        rows.stage(ids[:2], {"own": torch.ones(2, 2)})
        rows.keep()
        rows.stage(ids[:2], {"own": torch.full((2, 2), 7.0)})
        assert rows.read(ids)["own"][:, 0].tolist() == [7.0, 7.0, 0.0]
        rows.restore()
        assert rows.read(ids)["own"][:, 0].tolist() == [1.0, 1.0, 0.0], attempt
        rows.stage(ids[1:], {"own": torch.full((2, 2), 8.0)})
        assert rows.read(ids)["own"][:, 0].tolist() == [1.0, 8.0, 8.0]
    index = rows.index()
    rows.settle()
    assert RowStore(tmp_path, index).read(ids)["own"][:, 0].tolist() == [1.0, 8.0, 8.0]
    assert rows.file.stat().st_size <= (3 + 3 + 2) * 2 * 4, "live rows, a round's and an exchange's more"
    rows.begin()
    assert sorted({*rows._free, *rows.place.values()}) == list(range(rows._end)), "no record is lost"
    assert len(rows._free) + len(rows.place) == rows._end


@pytest.mark.parametrize("many", [3, 10])
def test_no_head_moves_before_all_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    """Few runs sync each file, many the file system; then the renames; then they are on the disk too."""
    stores = [Store(tmp_path / f"{number}").open() for number in range(many)]
    commit_all([store.prepare(0, {}, {}, {}, RowStore(store.path / "rows")) for store in stores])
    ready = [store.prepare(1, {}, {}, {}, RowStore(store.path / "rows")) for store in stores]
    events: list[str] = []
    fsync, replace, whole = os.fsync, os.replace, store_module.sync_file_system
    monkeypatch.setattr(
        os, "fsync", lambda handle: events.append(os.readlink(f"/proc/self/fd/{handle}")) or fsync(handle)
    )

    def renamed(source: Path, target: Path) -> None:
        events.extend(["rename"] * (target.name == "head.json"))
        replace(source, target)

    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(
        store_module, "sync_file_system", lambda handle: events.append("all") or whole(handle)
    )
    commit_all(ready)
    first = events.index("rename")
    if many == 10 and hasattr(ctypes.CDLL(None), "syncfs"):
        assert events == ["all", *["rename"] * 10, "all"]
    else:
        for store in stores:
            for file in (
                "state/000001.safetensors",
                "parts/000001.safetensors",
                "parts/000001.json",
                "state",
                "parts",
            ):
                assert str(store.path / file) in events[:first]
            for folder, names in {
                "state": ["000001.safetensors"],
                "parts": ["000001.safetensors", "000001.json"],
            }.items():
                files = [events.index(str(store.path / folder / name)) for name in names]
                assert max(files) < events.index(str(store.path / folder)), (
                    "a folder never names what is not on the disk"
                )
            assert any(event.startswith(str(store.path / ".head.json.")) for event in events[:first]), (
                "a head is whole before it is one"
            )
            assert str(store.path) in events[first:], "and the rename is on the disk"
    assert events.count("rename") == many
    for store in stores:
        assert store.round() == 1 and [file.name for file in (store.path / "state").iterdir()] == [
            "000001.safetensors"
        ]
        store.close()


def test_without_syncfs_each_file_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "sync_file_system", lambda handle: False)
    count = 0

    def counted(handle: int) -> None:
        nonlocal count
        count += 1

    monkeypatch.setattr(os, "fsync", counted)
    stores = [Store(tmp_path / f"{number}").open() for number in range(9)]
    commit_all([store.prepare(0, {}, {}, {}, RowStore(store.path / "rows")) for store in stores])
    assert count == 9 * (3 + 2 + 1 + 1), "three files, their folders, the head, its folder"


def test_a_process_is_not_forked_in_the_middle_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child would flush half-written files a second time."""
    store, write = Store(tmp_path).open(), Store.write
    monkeypatch.setattr(Store, "write", lambda self, ready: (time.sleep(0.2), write(self, ready))[1])
    with closing(WriteBehind()) as behind:
        assert behind.begin([store.prepare(1, {}, {}, {}, RowStore(tmp_path / "rows"))], on_one_thread)
        child = os.fork()
        if child == 0:
            os._exit(int(store.round() != 1))
        assert os.waitpid(child, 0)[1] == 0 and behind.done(0.0)
    store.close()


def test_a_store_is_closed_once_its_commit_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, write = Store(tmp_path).open(), Store.write
    monkeypatch.setattr(Store, "write", lambda self, ready: (time.sleep(0.1), write(self, ready))[1])
    with closing(WriteBehind()) as behind:
        assert behind.begin([store.prepare(1, {}, {}, {}, RowStore(tmp_path / "rows"))], on_one_thread)
        store.close()
        assert store.round() == 1 and behind.done(0.0)


def test_what_is_on_its_way_does_not_change_with_the_next_round(tmp_path: Path) -> None:
    store, model = Store(tmp_path).open(), torch.zeros(3)
    ready = store.prepare(1, {"model": model}, {"round": 1}, {"half": model[:2]}, RowStore(tmp_path / "rows"))
    copy = ready.copy()
    model += 1
    commit_all([copy])
    head = store.head()
    assert ready.size() == 12 + 8 and head is not None and head[1]["model"].tolist() == [0.0] * 3
    assert store.arrays(1)["half"].tolist() == [0.0, 0.0]
    store.close()
