"""Decoded arrays, kept as .npy files so that a dataset is decoded once and then mapped into memory.

The folder is ~/.cache/holdfast, or HOLDFAST_CACHE. It only saves time: where it cannot be written or is damaged, arrays are made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

ENVIRONMENT = "HOLDFAST_CACHE"
FORMAT = 1  # raise when the arrays made from the same files change

Arrays = dict[str, np.ndarray]


def cached(name: str, inputs: Sequence[Path], make: Callable[[], Arrays]) -> Arrays:
    """The arrays made from these files; made again when a file's path, size or time of change differs."""
    folder = _folder(name, inputs)
    if folder is None:
        return make()
    found = _read(folder)
    if found is not None:
        return found
    arrays = make()
    try:
        _write(folder, arrays)
    except OSError:  # read-only or full: work without
        return arrays
    return _read(folder) or arrays  # mapped, so that the decoded copy can be freed


def _folder(name: str, inputs: Sequence[Path]) -> Path | None:
    stamp = hashlib.sha256(f"{FORMAT} {name}".encode())
    for path in inputs:
        stat = path.stat()
        stamp.update(f"\n{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
    try:
        base = Path(os.environ.get(ENVIRONMENT) or "~/.cache/holdfast").expanduser()
    except RuntimeError:  # no home directory
        return None
    return base / f"{name}-{stamp.hexdigest()[:16]}"


def _read(folder: Path) -> Arrays | None:
    """None unless all is there: `names` is written last."""
    try:
        names = (folder / "names").read_text().split()
        # "c": private pages, which torch may hold as writable without the file ever changing
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False) for name in names}
    except (OSError, ValueError, EOFError):
        return None
    return arrays or None


def _write(folder: Path, arrays: Arrays) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        with _replacing(folder / f"{name}.npy") as path, open(path, "wb") as file:
            np.save(file, array, allow_pickle=False)
    with _replacing(folder / "names") as path:
        path.write_text("\n".join(arrays))


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A file beside the target that takes its place when complete, so that readers never see half of it."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        yield Path(name)
        with open(name, "rb") as file:
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
