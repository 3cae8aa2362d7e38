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
    """Read a JSON object from a file; None when there is no such file."""
    try:
        content = parse_json(read_whole(path))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise RunError(f"{path.parent} is a file; name a folder") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise RunError(f"{path} cannot be read: it does not hold a JSON object")
    return content


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. A mistake in it is a ValueError of one line; a missing file is an OSError."""
    text = read_whole(path, _TOML, pipe=True).decode()  # UnicodeDecodeError is a ValueError
    try:
        return bounded(tomllib.loads(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            "not valid TOML:"
            f" {_TOO_DEEP if isinstance(error, RecursionError) else in_print(str(error))[:200]}"
        ) from None


def read_whole(path: Path, most: int = _JSON, pipe: bool = False) -> bytes:
    """Read a file, of at most `most` bytes. A pipe or a device could block or never end, so only a path that
    the user names may be one (`pipe`)."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if pipe else os.O_NONBLOCK))
    with open(handle, "rb") as file:  # buffered: one bare read gives no more than 2 GB
        about = os.fstat(handle)
        if stat.S_ISDIR(about.st_mode) or not (pipe or stat.S_ISREG(about.st_mode)):
            raise ValueError("it is not a file")
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
    """The SHA-256 of a file, read piece by piece."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise RunError(f"{path} cannot be read: it is not a file")
        return hashlib.file_digest(file, "sha256").hexdigest()


def last_lines(path: Path, lines: int) -> list[str]:
    """The last lines of a log of any length; only its last bytes are read."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG))
        return file.read(_LOG).decode(errors="replace").splitlines()[-lines:]


def parse_json(text: bytes | str) -> Any:
    """Parse JSON as `as_json` writes it. Content that would fail only when it is used is a ValueError here:
    deep nesting, numbers that are infinite, NaN or too large for a float."""
    try:
        return bounded(json.loads(text, parse_float=_float, parse_int=_int, parse_constant=_float))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def bounded(content: Any) -> Any:
    """Return the content as it is, or raise a ValueError where it is nested deeper than any real file (later
    functions recurse into it) or holds a whole number too large for a float."""
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
        raise ValueError(f"{text[:40]} is not a finite number")
    return number


def _int(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def is_whole(value: Any, least: int = 0, most: int = 10**9) -> bool:
    """Whether this is a whole number in this range; True and False are not."""
    return type(value) is int and least <= value <= most


def is_number(value: Any) -> bool:
    return type(value) in (int, float)
