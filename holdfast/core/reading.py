"""Reading files that may hold anything: never more bytes, nesting or digits than a real file has. JSON and
TOML are parsed so that a value that could fail later is an error at once."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from holdfast.core.errors import RunError, in_print

_JSON = 1 << 28  # bytes that are read of a JSON file: a sweep of a hundred thousand cells has fewer
_TOML = 1 << 24
_LOG = 1 << 24  # bytes that are read of the end of a log
_PIECE = 1 << 20  # bytes that are read at a time
_TOO_DEEP = "it is nested too deeply"
_DEPTH = 64  # lists and objects within each other: a config has about six
_DIGITS = 300  # of a whole number: all such are finite as floats
_LARGEST = 10**_DIGITS


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
        return bounded(tomllib.loads(text))
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


def parse_json(text: bytes | str) -> Any:
    """As `as_json` writes it. All that would be an error only where it is used is one here, a ValueError:
    what is nested deeper than functions can follow, numbers that are infinite, none at all, or too large for
    a float."""
    try:
        return bounded(json.loads(text, parse_float=_float, parse_int=_int, parse_constant=_float))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def bounded(content: Any) -> Any:
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
