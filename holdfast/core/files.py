"""Files that are there whole or not at all, locks, and the system's refusals in words."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import math
import os
import platform
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, RunError, StoreError, in_print

_LIBC = ctypes.CDLL(None, use_errno=True)
HOST = platform.node().partition(".")[0]
_JSON = 1 << 28  # bytes that are read of a JSON file: a sweep of a hundred thousand cells has fewer
_TOML = 1 << 24
_LOG = 1 << 24  # bytes that are read of the end of a log
_PIECE = 1 << 20  # bytes that are read at a time
_TOO_DEEP = "it is nested too deeply"
_DEPTH = 64  # lists and objects within each other: a config has about six
_DIGITS = 300  # of a whole number: all such are finite as floats
_LARGEST = 10**_DIGITS


def expand(path: str | Path, setting: str) -> Path:
    """With ~ and ~somebody as the folders they stand for."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{setting}: {path} begins with the home directory of somebody who has none here; write the"
            " path out"
        ) from None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, as_json(content))


def write_atomically(path: Path, content: bytes) -> None:
    """All of it or nothing: a temporary file, synced, then renamed."""
    replace_file(path, content, durably=True)


def write_if_absent(path: Path, content: Mapping[str, Any]) -> None:
    """The same, unless the file is there already: of several processes, also on several machines, one
    wins."""
    temporary = write_beside(path, as_json(content), durably=True)
    with readable(path):
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
    """All of it or nothing, for whoever reads; for a machine that loses its power, only once it is synced."""
    temporary = write_beside(path, content, durably)
    with readable(path):
        try:
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    if durably:
        sync(path.parent)


def write_beside(path: Path, content: bytes, durably: bool = False) -> Path:
    """Into a temporary file, whose name no other process uses, on no machine."""
    temporary = path.with_name(f".{path.name}.{HOST}.{os.getpid()}.writing")
    with readable(path):
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
    """Temporary files of processes of this machine that were killed before they could rename them."""
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
    with readable(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_file_system(handle: int) -> bool:
    """Wait until all that the file system of an open file holds is on the disk: one flush instead of one for
    each file. False where the system has no such call. From Linux 5.8 on, a write that failed since the file
    was opened is an error here."""
    if not hasattr(_LIBC, "syncfs"):
        return False
    if _LIBC.syncfs(handle) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return True


def lock(path: Path, wait: bool = False) -> int | None:
    """An exclusive flock, as a handle to close. None where somebody else has it, unless one waits for it."""
    with readable(path):
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


def let_go_of_locks() -> None:
    """In a child of the process that holds them: a lock is free only when all who inherited it have closed
    it."""
    while _LOCKS:
        os.close(_LOCKS.pop())


_LOCKS: set[int] = set()  # handles of all locks that this process holds


def read_json(path: Path) -> dict[str, Any] | None:
    """An object from a file; None when there is no such file."""
    try:
        content = parse_json(read_whole(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise RunError(f"{path} cannot be read: it holds no object")
    return content


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file. What is wrong with it is a ValueError in one line, or an OSError where there is
    no such file."""
    text = read_whole(path, _TOML, pipe=True).decode()  # UnicodeDecodeError is a ValueError
    try:
        return shallow(tomllib.loads(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            "not valid TOML:"
            f" {_TOO_DEEP if isinstance(error, RecursionError) else in_print(str(error))[:200]}"
        ) from None


def read_whole(path: Path, most: int = _JSON, pipe: bool = False) -> bytes:
    """A file's content, and never more than so many bytes. A pipe or a device in its place would be waited
    for or never end: only what somebody names by hand may be one."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if pipe else os.O_NONBLOCK))
    with open(handle, "rb") as file:  # buffered: one bare read gives no more than 2 GB
        about = os.fstat(handle)
        if stat.S_ISDIR(about.st_mode) or not (pipe or stat.S_ISREG(about.st_mode)):
            raise ValueError("it is no file")
        if about.st_size > most:
            raise ValueError(f"it is longer than the {most:,} bytes that are read")
        if stat.S_ISREG(about.st_mode):
            return file.read(about.st_size)
        content = b""
        while piece := file.read(_PIECE):
            content += piece
            if len(content) > most:
                raise ValueError(f"it is longer than the {most:,} bytes that are read")
        return content


def digest_of_file(path: Path) -> str:
    """The SHA-256 of a file, of which a piece at a time is in memory."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise RunError(f"{path} cannot be read: it is no file")
        return hashlib.file_digest(file, "sha256").hexdigest()


def last_lines(path: Path, lines: int) -> list[str]:
    """The end of a log, which may have any length: not more of it is read than its last bytes."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG))
        return file.read(_LOG).decode(errors="replace").splitlines()[-lines:]


def memory() -> int:
    """Bytes that this machine has: the most that is read of a file of tensors, whatever length the file
    has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def parse_json(text: bytes | str) -> Any:
    """As `as_json` writes it. All that would be an error only where it is used is one here, a ValueError:
    what is nested deeper than functions can follow, numbers that are infinite, none at all, or too large for
    a float."""
    try:
        return shallow(json.loads(text, parse_float=_float, parse_int=_int, parse_constant=_float))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def shallow(content: Any) -> Any:
    """The same, unless it is nested deeper than anything that is written here, since later functions follow
    it level by level, or holds a whole number that no float comes near."""
    layer = [content]
    for _ in range(_DEPTH):
        if any(type(value) is int and abs(value) >= _LARGEST for value in layer):
            raise ValueError(f"a number has more than {_DIGITS} digits")
        inner = [
            value.values() if isinstance(value, dict) else value
            for value in layer
            if isinstance(value, (dict, list))
        ]
        layer = [value for values in inner for value in values if isinstance(value, (dict, list, int))]
        if not layer:
            return content
    raise ValueError(_TOO_DEEP)


def _float(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is no finite number")
    return number


def _int(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def is_whole(value: Any, least: int = 0, most: int = 10**9) -> bool:
    """A whole number in this range; a truth value is none."""
    return type(value) is int and least <= value <= most


def is_number(value: Any) -> bool:
    return type(value) in (int, float)


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
def readable(path: Path) -> Iterator[None]:
    """The system's refusals in words."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space; `holdfast resume` goes on with a run that has begun"
            raise StoreError(f"the disk is full: could not write {path}; {hint}") from None
        raise StoreError(f"cannot write {path}: {error.strerror or error}; choose another --out") from None
