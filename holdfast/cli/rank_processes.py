"""`--devices` of `holdfast run` and `holdfast resume`: the same command once for each device, as processes
that run one experiment together. They are started as torchrun would start them, on this machine alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from holdfast.cli.app import command_line, print_line, to_stderr
from holdfast.core.own_python import variables

PARENT = "HOLDFAST_RANK_PARENT"
"""The environment variable by which a rank knows that its stdin is held open by whoever started it."""
_LOOPBACK = "127.0.0.1"
_SECONDS = 10.0
"""For how long processes may say why they end, when one of them has."""


def options_again(context: typer.Context, **changed: Any) -> list[str]:
    """The command line of a command that is running, with some options changed; None leaves one out."""
    words = [str(context.info_name)]
    values = {**context.params, **changed}
    for param in context.command.params:
        value = values.get(str(param.name))
        given = value if isinstance(value, (list, tuple)) else [value]
        if value is None or value is False or value == param.default:
            continue
        if param.param_type_name == "argument":
            words += [str(each) for each in given]
        elif value is True:
            words.append(param.opts[0])
        else:
            words += [word for each in given for word in (param.opts[0], str(each))]
    return words


def run_on(devices: Sequence[str], words: Sequence[str], folder: Path) -> int:
    """Run a command on these devices, one process on each, and return its exit code. When a process ends
    with an error, the others are ended too, and a line says which one it was. They also end with this
    process, however it ends."""
    with socket.socket() as meeting:
        meeting.bind((_LOOPBACK, 0))
        meeting.listen(len(devices))
        ranks = [_start(rank, devices, words, meeting) for rank in range(len(devices))]
    try:
        return _wait(ranks, devices, folder)
    except KeyboardInterrupt:
        _wait_for(ranks, _SECONDS)  # Ctrl-C has reached them, too
        return 130
    finally:
        _end(ranks)


def _start(
    rank: int, devices: Sequence[str], words: Sequence[str], meeting: socket.socket
) -> subprocess.Popen[bytes]:
    from holdfast.engine.ranks import DEVICE, SOCKET, SWITCH

    count, handle = len(devices), meeting.fileno() if rank == 0 else -1
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    env = {
        **loopback,
        "TORCH_CPP_LOG_LEVEL": "FATAL",  # we say it in one line
        **variables(),
        SWITCH: "1",
        SOCKET: str(handle),
        DEVICE: devices[rank],
        PARENT: "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(meeting.getsockname()[1]),
    }
    return subprocess.Popen(
        # -P: files of the folder in which the user is are no modules
        [sys.executable, "-P", "-m", "holdfast", *words],
        env=env,
        stdin=subprocess.PIPE,
        stdout=None if rank == 0 else subprocess.DEVNULL,
        pass_fds=(handle,) if rank == 0 else (),
    )


def end_with_parent() -> None:
    """In a rank: end when the process that started it has ended, which closes the other end of stdin. What
    is committed stays."""
    if os.environ.get(PARENT) != "1":
        return

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], devices: Sequence[str], folder: Path) -> int:
    """Wait until all have ended. The first one's exit code counts, unless another failed."""
    while all(process.poll() in (None, 0) for process in ranks):
        if all(process.poll() == 0 for process in ranks):
            return 0
        time.sleep(0.1)
    rank = next(rank for rank, process in enumerate(ranks) if process.poll() not in (None, 0))
    code = ranks[rank].returncode
    _wait_for(ranks, _SECONDS)
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        print_line(to_stderr(), f"rank {rank} ({devices[rank]}) was ended by {name}; the others were stopped")
        if (folder / "head.json").exists():
            again = command_line("resume", folder, "--devices", ",".join(devices))
            print_line(to_stderr(), f"`{again}` goes on from the last committed round")
        return 1
    return ranks[0].returncode or code


def _wait_for(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    until = time.monotonic() + seconds
    for process in ranks:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    _wait_for(ranks, _SECONDS)
    for process in ranks:
        if process.poll() is None:
            process.kill()
            process.wait()
