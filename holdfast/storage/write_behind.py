"""Committing a round while the next one trains.

A round is copied where its tensors may still be used, and a thread of its own then does all that touches the
disk, in the same order as `commit_all`. At most one commit is on its way: the one before is done when the
next begins, so a kill loses at most the rounds that were not renamed, as without the thread. Only the thread
that trains changes what a run knows of itself (`settle_all`); an error of the other thread is raised there.

A process is never forked in the middle of a commit: the child would have half-written files of its own."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from holdfast.core.memory import physical_memory
from holdfast.storage.store import PreparedRound, settle_all, write_all

Each = Callable[[Callable[[PreparedRound], PreparedRound], Sequence[PreparedRound]], list[PreparedRound]]
_SHARE = 32
"""The copies may have this part of the machine's memory; a larger round is committed before the next."""


class WriteBehind:
    """The thread that commits, and the commit that is on its way."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._ready: list[PreparedRound] = []
        self._commit: Future[None] | None = None
        _ALL.add(self)

    def begin(self, ready: Sequence[PreparedRound], each: Each) -> bool:
        """Begin to commit these rounds; `each` copies them. Nothing is begun, and False returned, where their
        copies would be too large, or where a run begins: that exists on the disk before it trains."""
        assert self._commit is None, "at most one commit is on its way"
        if any(one.round == 0 for one in ready) or sum(one.size() for one in ready) > most_behind():
            return False
        copies = each(PreparedRound.copy, ready)  # complete: the other thread makes no call to a GPU
        for one in copies:
            if one.rows is not None:
                one.rows.keep()  # what the round replaced itself is not written; from now on nothing changes
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-commit")
        self._ready, self._commit = copies, self._thread.submit(write_all, copies)
        for one in copies:
            one.store.on_its_way = self._commit
            if one.rows is not None:
                one.rows.hand_over(self._commit)
        return True

    def done(self, within: float | None) -> bool:
        """Whether the commit that was on its way is done within so many seconds; None waits for it. Its error
        is raised."""
        if self._commit is None:
            return False
        wait([self._commit], within)
        if not self._commit.done():
            return False
        self._commit.result()
        settle_all(self._ready)
        self._ready, self._commit = [], None
        return True

    def close(self) -> None:
        """End the thread, once the commit on its way is done."""
        if self._thread is not None:
            self._thread.shutdown()

    def pause(self) -> None:
        """Wait until nothing is being written."""
        if self._commit is not None:
            wait([self._commit])


def most_behind() -> int:
    """Bytes of the host's memory that the copies of one round may have; of its private rows as many more."""
    return physical_memory() // _SHARE


_ALL: weakref.WeakSet[WriteBehind] = weakref.WeakSet()


def _pause_all() -> None:
    for each in list(_ALL):
        each.pause()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_pause_all)
