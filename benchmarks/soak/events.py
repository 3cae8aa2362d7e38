"""What happens to the files of a run, as it happens: Linux's inotify, so that a kill can fall between two
steps of a commit."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path

_MODIFIED, _MOVED, _CREATED, _DELETED = 0x2, 0x80, 0x100, 0x200
_WORDS = {_MODIFIED: "written", _MOVED: "renamed to", _CREATED: "created", _DELETED: "deleted"}
_LIBC = ctypes.CDLL(None, use_errno=True)


class Watch:
    """Follows some folders, also those that do not exist yet. A commit is the renaming of a head.json."""

    def __init__(self, folders: Callable[[], Iterable[Path]]):
        self._folders = folders
        self._handle = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._handle < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._names: dict[int, Path] = {}
        self._known: set[Path] = set()
        self.commits: list[float] = []
        """When."""
        self.look()

    def close(self) -> None:
        os.close(self._handle)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def look(self) -> None:
        """Follow folders that have come into being."""
        for folder in self._folders():
            if folder not in self._known and folder.is_dir():
                number = _LIBC.inotify_add_watch(
                    self._handle, os.fsencode(folder), _MODIFIED | _MOVED | _CREATED | _DELETED
                )
                if number >= 0:
                    self._names[number] = folder
                    self._known.add(folder)

    def forget(self, folder: Path) -> None:
        """One that was removed, so that another of its name is followed."""
        self._known = {known for known in self._known if known != folder and folder not in known.parents}

    def until(
        self,
        seconds: float,
        events: int | None = None,
        commits: int = 0,
        ended: Callable[[], bool] = lambda: False,
    ) -> str | None:
        """Wait for so many seconds, or for so many events, counted after so many commits. What was seen last;
        None when `ended` before."""
        end, seen, wanted = time.monotonic() + seconds, 0, len(self.commits) + commits
        while time.monotonic() < end:
            for event in self._read(
                min(
                    0.005 if len(self._known) < len(list(self._folders())) else 0.05,
                    max(end - time.monotonic(), 0),
                )
            ):
                seen += len(self.commits) >= wanted
                if events is not None and seen >= events and len(self.commits) >= wanted:
                    return event
            self.look()
            if ended():
                self._read(0)
                return None
        return f"after {seconds:.2f} s"

    def _read(self, seconds: float) -> list[str]:
        if not select.select([self._handle], [], [], seconds)[0]:
            return []
        try:
            content = os.read(self._handle, 1 << 16)
        except BlockingIOError:
            return []
        found, place = [], 0
        while place < len(content):
            number, mask, _, length = struct.unpack_from("iIII", content, place)
            name = content[place + 16 : place + 16 + length].rstrip(b"\0").decode(errors="replace")
            place += 16 + length
            words = next((words for bit, words in _WORDS.items() if mask & bit), None)
            if words is None:
                continue
            if mask & _MOVED and name == "head.json":
                self.commits.append(time.monotonic())
            found.append(f"{_short(name)} {words}".replace("renamed to", "in place"))
        return found


def _short(name: str) -> str:
    """Without the host and the process that a temporary file is named after."""
    return ".".join(name.split(".")[:3]) + ".writing" if name.endswith(".writing") else name
