"""Worker processes are children forked from this process. They have a copy of everything it held at that
time, including user functions and samples, and receive only what is new. The bytes of tensors are sent
through a socket unchanged. Workers hold no lock, write no file and end when their parent ends."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from holdfast.core.error_origin import note_place, place_of
from holdfast.core.errors import RunError
from holdfast.core.files import close_inherited_locks

Work = Callable[[Any], Any]


class WorkerLost(RunError):
    """A worker process ended in the middle of its work: memory ran out, or it was killed. The work itself may
    be fine."""


_BUFFER = 1 << 22  # bytes that a socket should hold; a large buffer means fewer switches between processes
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


def can_fork() -> bool:
    return hasattr(os, "fork")


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pool:
    """A number of workers, each with one thread. They call `work` with one message after the other."""

    def __init__(self, count: int, work: Work):
        self._links: list[socket.socket] = []
        self._pids: list[int | None] = []
        self.close = weakref.finalize(self, _end, os.getpid(), self._pids, self._links)
        """Ends the workers at once, because they have nothing to save. It is called at the latest when the
        pool is no longer referenced."""
        try:
            for _ in range(count):
                self._fork(work)
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        return len(self._links)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that are not known to have ended."""
        return [pid for pid in self._pids if pid is not None]

    def answers(self, jobs: Sequence[Callable[[], Any]]) -> Iterator[Any]:
        """Yield the workers' answers to these messages, in their order. A message is made only when a free
        worker takes it, and no worker runs far ahead, so few messages and answers exist at a time. Any error
        ends the pool, so that no later call can read an answer to an earlier message."""
        free, busy, found = list(range(self.size)), dict[int, int](), dict[int, Any]()
        given = 0
        try:
            for place in range(len(jobs)):
                while True:
                    while free and given < min(len(jobs), place + 2 * self.size):
                        worker = free.pop(0)
                        self._send(worker, jobs[given]())
                        busy[worker], given = given, given + 1
                    if place in found:
                        break
                    for worker in self._ready(busy):
                        found[busy.pop(worker)] = self._receive(worker)
                        free.append(worker)
                yield found.pop(place)
        except BaseException:
            self.close()
            raise

    def _ready(self, busy: Iterable[int]) -> list[int]:
        """Return the workers that have an answer, or have ended."""
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(self._links[worker], selectors.EVENT_READ, worker)
            return [key.data for key, _ in selector.select()]

    def _fork(self, work: Work) -> None:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # without the flush, buffered output would be written twice
                stream.flush()
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python warns about forking a process with threads; a worker does not use those threads
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                for end in (*self._links, ours):  # an open copy would hide the parent's end from a worker
                    end.close()
                _serve(theirs, work, parent)
            finally:
                os._exit(0)
        theirs.close()
        self._links.append(ours)
        self._pids.append(pid)

    def _send(self, worker: int, message: Any) -> None:
        try:
            send(self._links[worker], message)
        except OSError:
            raise self._lost(worker) from None

    def _receive(self, worker: int) -> Any:
        try:
            answer, failure = receive(self._links[worker])
        except (EOFError, OSError):
            raise self._lost(worker) from None
        if failure is not None:
            raise _error(*failure)
        return answer

    def _lost(self, worker: int) -> WorkerLost:
        pid, self._pids[worker] = self._pids[worker], None
        code = 0
        with suppress(ChildProcessError):  # the program may collect its children itself
            code = os.waitstatus_to_exitcode(os.waitpid(pid or -1, 0)[1])
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else "ended"
        return WorkerLost(
            f"worker process {worker + 1} of {self.size} (process {pid}) {how} in the middle of its work; "
            "if memory is short, lower engine.memory or set engine.workers = 1"
        )


def _end(owner: int, pids: list[int | None], links: list[socket.socket]) -> None:
    """End the workers, but only in their parent: other processes that it forked have the same list."""
    if os.getpid() != owner:
        return
    for link in links:
        link.close()
    for pid in (pid for pid in pids if pid is not None):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _serve(link: socket.socket, work: Work, parent: int) -> None:
    """Run a worker: answer messages until the parent ends."""
    # Ctrl-C reaches the whole group of processes, and the parent ends the workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        return
    gc.freeze()  # a worker must not finalise inherited objects
    close_inherited_locks()
    torch.set_num_threads(1)  # more than one would wait for the parent's threads, which a fork does not copy
    while True:
        try:
            message = receive(link)
        except (EOFError, OSError):
            return
        reply: tuple[Any, Any]
        try:
            reply = work(message), None
        except BaseException as error:
            reply = None, _sendable(error)
        del message
        with suppress(Exception):  # a user's code may have printed
            sys.stdout.flush()
        send(link, reply)
        del reply


def _sendable(error: BaseException) -> tuple[bytes | None, str, str, str, tuple[str, int, str] | None]:
    """Return an error in a form that can be sent: as text, and pickled where that is possible."""
    text, place = str(error), place_of(error)
    with suppress(Exception):
        packed = pickle.dumps(error)
        again = pickle.loads(packed)
        if type(again) is type(error) and isinstance(again, Exception) and str(again) == text:
            return packed, type(error).__name__, text, "".join(traceback.format_exception(error)), place
    return None, type(error).__name__, text, "".join(traceback.format_exception(error)), place


def _error(
    packed: bytes | None, name: str, text: str, trace: str, place: tuple[str, int, str] | None
) -> Exception:
    error: Exception = RunError(f"{name}: {text}") if packed is None else pickle.loads(packed)
    note_place(error, place)
    error.add_note(f"in a worker process:\n{trace}")
    return error


class _Pickler(pickle.Pickler):
    """A pickler that keeps the content of tensors outside the pickle, so that it is not copied into it."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _tensor, (pickle.PickleBuffer(content.numpy().data), value.dtype, tuple(value.shape))


def _tensor(content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return (
        torch.frombuffer(content, dtype=dtype).view(shape)
        if len(content)
        else torch.empty(shape, dtype=dtype)
    )


def send(link: socket.socket, message: Any) -> None:
    """Send the number of pieces, their sizes, and the pieces: a pickle and the tensors' contents."""
    head, contents = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(head, protocol=5, buffer_callback=contents.append).dump(message)
    pieces = [head.getbuffer(), *(content.raw() for content in contents)]
    link.sendall(struct.pack(f"<{len(pieces) + 1}Q", len(pieces), *(piece.nbytes for piece in pieces)))
    for piece in pieces:
        link.sendall(piece)


def receive(link: socket.socket) -> Any:
    """Receive a message. Pickle is safe here, because only this process and its forked children have the pair
    of sockets."""
    (count,) = struct.unpack("<Q", _exactly(link, 8))
    sizes = struct.unpack(f"<{count}Q", _exactly(link, 8 * count))
    head, *contents = [_exactly(link, size) for size in sizes]
    return pickle.loads(head, buffers=contents)


def _exactly(link: socket.socket, size: int) -> memoryview:
    memory = torch.empty(size, dtype=torch.uint8).numpy().data  # not cleared beforehand, unlike a bytearray
    done = 0
    while done < size:
        more = link.recv_into(memory[done:])
        if not more:
            raise EOFError
        done += more
    return memory
