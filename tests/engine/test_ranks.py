"""Processes that torch.distributed joins: the same bits for any number of them, and one line when one of them
does not come."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.errors import ConfigError, RunError
from holdfast.engine import ranks
from holdfast.engine.ranks import Place, _who, all_well, alone_only, on_first, place, rank_device, wait_limit
from tests.thread_ranks import ThreadRanks, on_ranks

GLOO = {"HOLDFAST_RANKS": "1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def processes(count: int, words: list[str], **env: str) -> list[subprocess.CompletedProcess[str]]:
    """Run a command of Python in so many processes that find each other."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, *words],
            env={
                **os.environ,
                **GLOO,
                "MASTER_PORT": port,
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                **env,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    ended = []
    for process in started:
        out, err = process.communicate(timeout=240)
        ended.append(subprocess.CompletedProcess(words, process.returncode, out, err))
    return ended


@pytest.mark.slow
def test_every_part_has_the_same_bits_on_one_two_and_three_processes(tmp_path: Path) -> None:
    said = {}
    for count in (1, 2, 3):
        ended = processes(count, ["-m", "tests.engine.gloo_ranks", str(tmp_path / str(count))])
        assert [process.returncode for process in ended] == [0] * count, ended[0].stderr
        assert len({process.stdout for process in ended}) == 1  # every rank knows the same
        said[count] = ended[0].stdout.splitlines()
    assert len(said[1]) > 30
    assert said[1] == said[2] == said[3]


WAITS = """
import sys, time
from holdfast.engine.ranks import here
ranks = here()
ranks.agree(1)
if ranks.rank == 2:
    {what}
try:
    ranks.agree(2)
except Exception as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("time.sleep(4); sys.exit()", "rank 2 has not answered for 2 s (HOLDFAST_RANK_TIMEOUT)"),
        ("import os; os._exit(9)", "rank 2 has ended"),
    ],
)
def test_a_rank_that_is_late_or_gone_is_named(what: str, expected: str) -> None:
    ended = processes(3, ["-c", WAITS.format(what=what)], HOLDFAST_RANK_TIMEOUT="2")
    assert expected in ended[0].stdout
    assert "rank" in ended[1].stdout


def test_a_process_that_nobody_started_beside_others_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert place() is None and ranks.here() is None and not ranks.follows()


def test_the_environment_of_torchrun_is_read_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "x"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert place() is None  # of another launcher, which may start processes for other ends
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert place() == Place(5, 8, 1, 4) and ranks.follows()
    with pytest.raises(ConfigError, match="torchrun runs one experiment on several processes, not a sweep"):
        alone_only("a sweep")
    monkeypatch.setenv("HOLDFAST_RANKS", "0")
    assert place() is None
    monkeypatch.setenv("HOLDFAST_RANKS", "1")
    monkeypatch.setenv("RANK", "8")
    with pytest.raises(ConfigError, match="ranks are numbered from 0"):
        place()
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="start the run with torchrun"):
        place()


def test_each_rank_of_a_machine_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [rank_device("cuda", Place(rank, 4, rank % 2, 2)) for rank in range(4)] == [
        "cuda:0",
        "cuda:1",
        "cuda:0",
        "cuda:1",
    ]
    assert rank_device("cpu", Place(0, 2, 0, 2)) == "cpu"
    assert rank_device("cuda:1", Place(0, 2, 0, 1)) == "cuda:1"
    with pytest.raises(ConfigError, match="cannot all train on cuda:1"):
        rank_device("cuda:1", Place(0, 2, 0, 2))
    with pytest.raises(ConfigError, match="3 ranks on a machine with 2 GPUs"):
        rank_device("cuda", Place(0, 3, 0, 3))
    monkeypatch.setenv("HOLDFAST_SHARE_GPU", "1")
    assert rank_device("cuda", Place(2, 3, 2, 3)) == "cuda:0"
    monkeypatch.setenv("HOLDFAST_RANK_DEVICE", "cuda:1")
    assert rank_device("cuda", Place(0, 3, 0, 3)) == "cuda:1"


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_a_time_limit_has_to_be_a_number_of_seconds(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_RANK_TIMEOUT", text)
    with pytest.raises(ConfigError, match="HOLDFAST_RANK_TIMEOUT"):
        wait_limit()


def test_a_lost_rank_is_named_where_torch_names_it() -> None:
    text = "[Rank 0]: Rank 3 failed to pass monitoredBarrier in 5000 ms\n Connection closed by peer"
    assert _who(text, 5).startswith("rank 3 has ended;")
    assert _who("Timed out waiting 5000ms", 5).startswith("another rank has not answered for 5 s")


def test_what_the_first_rank_does_is_known_to_all() -> None:
    calls: list[int] = []

    def once(ranks: ThreadRanks) -> Any:
        return on_first(ranks, lambda: calls.append(ranks.rank) or {"folder": "runs/x"})

    assert on_ranks(3, once) == [{"folder": "runs/x"}] * 3
    assert calls == [0]


def test_an_error_of_one_rank_is_that_of_all_with_its_kind() -> None:
    def fail(ranks: ThreadRanks) -> str:
        error = ConfigError("no such folder") if ranks.rank == 1 else None
        try:
            all_well(ranks, error)
        except (ConfigError, RunError) as raised:
            return f"{type(raised).__name__}: {raised}"
        return ""

    other = "ConfigError: rank 1: no such folder"
    assert on_ranks(3, fail) == [other, "ConfigError: no such folder", other]
