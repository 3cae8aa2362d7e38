"""Writing files: whole or not at all, with locks, and with errors of the system as one plain line."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, StoreError

_LIBC = ctypes.CDLL(None, use_errno=True)
HOST = platform.node().partition(".")[0]


def expand(path: str | Path, setting: str) -> Path:
    """A path with ~ and ~user replaced by home directories."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{setting}: {path} begins with the home directory of an unknown user; write the full path"
        ) from None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, as_json(content))


def write_atomically(path: Path, content: bytes) -> None:
    """Write a whole file or nothing: a temporary file is synced, then renamed."""
    replace_file(path, content, durably=True)


def write_if_absent(path: Path, content: Mapping[str, Any]) -> None:
    """Write a whole file unless it exists already. If several processes try, on one or more machines, one of
    them succeeds."""
    temporary = write_beside(path, as_json(content), durably=True)
    with plain_disk_errors(path):
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            if not path.exists():  # a file system without links
                os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    sync(path.parent)


def replace_file(path: Path, content: bytes, durably: bool = False) -> None:
    """Write a whole file or nothing, as readers see it. After a loss of power this holds only if it was
    written `durably`."""
    temporary = write_beside(path, content, durably)
    with plain_disk_errors(path):
        try:
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    if durably:
        sync(path.parent)


def write_beside(path: Path, content: bytes, durably: bool = False) -> Path:
    """Write a temporary file beside `path`, under a name that no other process on any machine uses."""
    temporary = path.with_name(f".{path.name}.{HOST}.{os.getpid()}.writing")
    with plain_disk_errors(path):
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                if durably:
                    os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return temporary


def remove_left_over(folder: Path) -> None:
    """Remove temporary files of processes of this machine that were killed before they could rename them."""
    for file in folder.glob(f".*.{HOST}.*.writing"):
        pid = file.name.split(".")[-2]
        if pid.isdecimal() and not _lives(int(pid)):
            file.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    return True


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    with plain_disk_errors(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_file_system(handle: int) -> bool:
    """Wait until all that the file system of an open file holds is on the disk: one flush instead of one for
    each file. Returns False where the system has no such call. From Linux 5.8 on, a write that failed since
    the file was opened is an error here."""
    if not hasattr(_LIBC, "syncfs"):
        return False
    if _LIBC.syncfs(handle) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return True


def lock(path: Path, wait: bool = False) -> int | None:
    """Take an exclusive flock. Returns a handle to close, or None where another process holds the lock and
    `wait` is false."""
    with plain_disk_errors(path):
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
    _LOCKS.add(handle)
    return handle


def unlock(handle: int) -> None:
    _LOCKS.discard(handle)
    os.close(handle)


def close_inherited_locks() -> None:
    """Close the locks that a child process inherited: a lock is free only when every process that has it
    closed it."""
    while _LOCKS:
        os.close(_LOCKS.pop())


_LOCKS: set[int] = set()  # handles of all locks that this process holds


def as_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(clean(content), indent=1, sort_keys=True) + "\n").encode()


def clean(value: Any) -> Any:
    """JSON has no NaN and no infinity: both become null."""
    if isinstance(value, Mapping):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextmanager
def plain_disk_errors(path: Path) -> Iterator[None]:
    """Raise the system's errors as one plain line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space; `holdfast resume` goes on with a run that has begun"
            raise StoreError(f"the disk is full: could not write {path}; {hint}") from None
        raise StoreError(f"cannot write {path}: {error.strerror or error}; choose another --out") from None
