"""Worker processes on their own: messages, errors, deaths, and nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.errors import RunError
from holdfast.engine.workers import Pool, receive, send
from holdfast.storage.store import Store

REPOSITORY = Path(__file__).resolve().parents[2]


class Odd(Exception):
    """Cannot be pickled: its arguments are not what it is made of."""

    def __init__(self, a: int, b: int):
        super().__init__(f"odd {a + b}")


def work(message: Any) -> Any:
    if message == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if message == "leave":
        os._exit(3)
    if isinstance(message, BaseException) or message == "odd":
        raise Odd(1, 2) if message == "odd" else message
    return message, os.getpid(), torch.get_num_threads()


def ask(pool: Pool, *messages: Any) -> list[Any]:
    return list(pool.answers([lambda m=m: m for m in messages]))  # type: ignore[misc]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_answers_come_in_the_order_of_the_messages() -> None:
    pool = Pool(2, work)
    answers = ask(pool, *range(7))
    assert [message for message, _, _ in answers] == list(range(7))
    pids = {pid for _, pid, _ in answers}
    assert len(pids) == 2 and os.getpid() not in pids and {threads for _, _, threads in answers} == {1}
    assert ask(pool) == [] and [m for m, _, _ in ask(pool, "again")] == ["again"]
    pool.close()
    assert all(map(gone, pids))  # gone altogether: a zombie would still be there


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
)
def test_tensors_travel_as_they_are(dtype: torch.dtype) -> None:
    ours, theirs = socket.socketpair()
    wide = torch.arange(12).view(3, 4).to(dtype)
    sent = {
        "a": wide,
        "b": wide.t(),
        "c": wide[:0],
        "d": wide[0, 0],
        "e": wide[:1].expand(5, -1),
        "f": torch.zeros(2, 0, dtype=dtype),
    }
    send(ours, (sent, "and words", 3))
    got, words, number = receive(theirs)
    assert (words, number) == ("and words", 3)
    assert all(torch.equal(got[name], value) and got[name].dtype == dtype for name, value in sent.items())
    got["a"][0] = 1  # and may be written to


def test_messages_larger_than_a_socket_buffer_arrive() -> None:
    big = torch.randn(3_000_000)
    pool = Pool(2, lambda message: message * 2)
    assert all(torch.equal(answer, big * 2) for answer in ask(pool, *[big] * 5))
    pool.close()


def test_a_message_is_made_when_its_worker_is_free() -> None:
    made: list[int] = []
    pool = Pool(2, work)
    answers = pool.answers([lambda i=i: made.append(i) or i for i in range(9)])  # type: ignore[misc]
    next(answers)
    assert made in ([0, 1, 2], [0, 1, 2, 3])
    answers.close()  # somebody stops asking: what was under way must not answer the next question
    assert pool.close.alive is False


def test_a_slow_worker_does_not_delay_the_others() -> None:
    pool = Pool(2, lambda seconds: (time.sleep(seconds), os.getpid())[1])
    slow, *quick = ask(pool, 0.3, *[0.0] * 3)
    assert slow not in quick and len(set(quick)) == 1
    pool.close()


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ZeroDivisionError("by zero"), ZeroDivisionError, "by zero"),
        (RunError("one line"), RunError, "one line"),
        ("odd", RunError, "Odd: odd 3"),
        (SystemExit("enough"), RunError, "SystemExit: enough"),
        (KeyError("k"), KeyError, "'k'"),
    ],
)
def test_errors_keep_their_type_and_words(error: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        ask(Pool(2, work), 1, error, 2)
    assert (
        type(caught.value) is kind
        and str(caught.value) == text
        and "in a worker process" in caught.value.__notes__[0]
    )


@pytest.mark.parametrize(
    ("message", "words"), [("die", "was ended by SIGKILL"), ("leave", "ended in the middle")]
)
def test_a_worker_that_dies_is_named(message: str, words: str) -> None:
    pool = Pool(3, work)
    pids = [pid for _, pid, _ in ask(pool, 0, 1, 2)]
    with pytest.raises(RunError, match="worker process 2 of 3") as error:
        ask(pool, 0, message, 2, 3, 4, 5)
    assert words in str(error.value) and "\n" not in str(error.value) and all(map(gone, pids))


def test_threads_of_the_parent_do_not_matter() -> None:
    """OpenMP's threads are not inherited: a child that used them would wait for ever."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        a = torch.randn(700, 700)
        expected = (a @ a).sum()
        done = ask(Pool(2, lambda _: (a @ a).sum()), 0, 1)
        torch.testing.assert_close(done[0], expected, rtol=1e-3, atol=1e-1)
        assert torch.equal(*done)
        assert torch.get_num_threads() == 2 and bool(torch.isfinite((a @ a).sum()))
    finally:
        torch.set_num_threads(before)


def test_from_a_thread_and_beside_one() -> None:
    """Forking while another thread works, from a thread that is not the main one."""
    stop, got = threading.Event(), []
    other = threading.Thread(target=lambda: [print(end="") for _ in iter(stop.is_set, True)])
    other.start()
    worker = threading.Thread(target=lambda: got.extend(ask(Pool(2, work), 1, 2)))
    worker.start()
    worker.join(30)
    stop.set()
    other.join()
    assert [message for message, _, _ in got] == [1, 2]


def test_a_pool_that_is_no_longer_referenced_ends_its_workers() -> None:
    pool = Pool(1, work)
    ((_, pid, _),) = ask(pool, 0)
    del pool
    assert gone(pid)


def test_workers_do_not_hold_the_lock_of_a_run(tmp_path: Path) -> None:
    store = Store(tmp_path / "run").open()
    pool = Pool(2, work)
    ask(pool, 1, 2)
    with pytest.raises(RunError, match="in use"):
        Store(tmp_path / "run").open()
    store.close()
    Store(tmp_path / "run").open().close()
    pool.close()


ORPHANS = """
import os, sys, time
from holdfast.engine.workers import Pool
def work(message):
    if message == "pid":
        return os.getpid()
    time.sleep(600)
pool = Pool(2, work)
print(*pool.answers([lambda: "pid"] * 2), flush=True)
if sys.argv[1] == "busy":
    list(pool.answers([lambda: "sleep"] * 2))
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("state", "number"),
    [
        ("busy", signal.SIGKILL),
        pytest.param("busy", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("busy", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("idle", signal.SIGKILL, marks=pytest.mark.slow),
        ("idle", signal.SIGINT),
        pytest.param("idle", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_workers_end_with_their_parent(state: str, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ORPHANS, state],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=REPOSITORY,
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.send_signal(number)
        parent.wait(120)
    end = time.monotonic() + 120
    while not all(map(gone, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    assert all(map(gone, pids))
