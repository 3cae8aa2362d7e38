"""Decoded arrays, kept as .npy files so that a dataset is decoded once and then mapped into memory.

Arrays are decoded straight into the files and read from them page by page, so that a dataset may be larger
than memory. The folder is ~/.cache/holdfast, or HOLDFAST_CACHE. It only saves time: where it cannot be
written or is damaged, arrays are made again.

"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import DataError, StoreError
from holdfast.core.files import HOST, as_json, parse_json, read_whole, sync, write_json

ENVIRONMENT = "HOLDFAST_CACHE"
FORMAT = 3  # raise when what is made from the same files changes
FACTS = "facts.json"
_PRIVATE = 1 << 29  # bytes of an array
_SUMMED = 1 << 24  # the same: labels and users of two million rows

Shape = tuple[int, ...]
New = Callable[[str, Shape, Any], np.ndarray]


@dataclass(frozen=True, eq=False)
class CachedArrays:
    """What was made: arrays that may only be read, and small things that JSON can hold."""

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]


def cached(name: str, inputs: Sequence[Path], make: Callable[[New], Mapping[str, Any]]) -> CachedArrays:
    """What `make` makes of these files; made again when the name or a file's path, size or time of change
    differs.

    `make(new)` fills arrays that it gets from new(array_name, shape, dtype), and returns the small things.
    The name begins with the dataset's and goes on with every setting that matters to what is made.

    """
    folder = _folder(name, inputs)
    found = _read(folder) if folder else None
    if found is not None:
        return found
    with _making(folder) as place:
        maker = _Maker(place)
        facts = json.loads(as_json(make(maker.new)))  # as they will be read
        if folder and place and not maker.refused and _keep(folder, place, maker.arrays, facts):
            return _read(folder) or CachedArrays(maker.arrays, facts)
        return CachedArrays(maker.arrays, facts)


def cache_folder() -> Path | None:
    """None where there is no home directory."""
    try:
        return Path(os.environ.get(ENVIRONMENT) or "~/.cache/holdfast").expanduser()
    except RuntimeError:
        return None


class _Maker:
    """Hands out arrays to fill: mapped files, or memory where the folder takes no files."""

    def __init__(self, place: Path | None):
        self.place, self.refused = place, ""
        self.arrays: dict[str, np.ndarray] = {}

    def new(self, name: str, shape: Shape, dtype: Any) -> np.ndarray:
        array = self._mapped(name, shape, np.dtype(dtype))
        if array is None:
            try:
                array = np.empty(shape, dtype)
            except MemoryError:
                why = self.refused or "there is no home directory"
                raise DataError(
                    f"{name} does not fit into memory, and the cache cannot hold it ({why}); set"
                    f" {ENVIRONMENT}"
                ) from None
        self.arrays[name] = array
        return array

    def _mapped(self, name: str, shape: Shape, dtype: np.dtype) -> np.ndarray | None:
        if self.place is None or not np.prod(shape):
            return None
        path = self.place / f"{name}.npy"
        try:
            array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
            with open(
                path, "r+b"
            ) as file:  # a full disk must be an error here, not a SIGBUS when a page is written
                os.posix_fallocate(file.fileno(), 0, file.seek(0, os.SEEK_END))
        except OSError as error:
            self.refused = error.strerror or str(error)
            return None
        return array


def _folder(name: str, inputs: Sequence[Path]) -> Path | None:
    stamp = hashlib.sha256(f"{FORMAT} {name}".encode())
    for path in inputs:
        try:
            stat = path.stat()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
        stamp.update(f"\n{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
    base = cache_folder()
    word = re.match(r"[\w.-]*", name)
    return base and base / f"{word[0] if word else ''}-{stamp.hexdigest()[:16]}"


def _read(folder: Path) -> CachedArrays | None:
    """None unless all is there, and as it was written as far as that is quickly seen."""
    try:
        said = parse_json(read_whole(folder / FACTS))
        facts, about = said["facts"], said["arrays"]
        arrays = {name: _load(folder / f"{name}.npy", one) for name, one in about.items()}
        found = {name: _about(array, about[name]["mapped"]) for name, array in arrays.items()}
        sound = found == about and said["sum"] == _sum(facts, about)
    except Exception:  # whatever damaged files can make of JSON and NumPy
        return None
    return CachedArrays(arrays, facts) if sound else None


def _about(array: np.ndarray, mapped: bool) -> dict[str, Any]:
    """What an array must be when it is read again. The values of large ones are not looked at, which would
    take as long as to read them."""
    values = zlib.crc32(np.ascontiguousarray(array).data) if array.nbytes <= _SUMMED else None
    return {"mapped": mapped, "shape": list(array.shape), "dtype": array.dtype.str, "values": values}


def _sum(facts: Mapping[str, Any], about: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps([facts, about], sort_keys=True).encode())


def _load(path: Path, about: Mapping[str, Any]) -> np.ndarray:
    """Small arrays as private pages: what a plug-in writes there by mistake can be noticed, and never reaches
    the file. Large ones to be read only, where such a mistake ends the process: the system refuses private
    pages for more than memory holds."""
    if not path.is_file():  # a pipe would be waited for
        raise ValueError(f"{path} is no file")
    if about["mapped"]:
        return np.load(path, mmap_mode="r" if path.stat().st_size > _PRIVATE else "c", allow_pickle=False)
    if (
        0 not in about["shape"]
    ):  # only what is empty is not mapped; to read it would ask for as much memory as the file claims
        raise ValueError(f"{path} is not empty")
    return np.empty(about["shape"], about["dtype"])


@contextlib.contextmanager
def _making(folder: Path | None) -> Iterator[Path | None]:
    """A folder beside the entry that takes its place when complete; None where none can be made. What is left
    of it goes away."""
    place = None
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            _sweep(folder)
            mine = folder.parent / f".{folder.name}.{HOST}.{os.getpid()}.{uuid.uuid4().hex}.making"
            mine.mkdir()
            place = mine
    try:
        yield place
    finally:
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """What processes of this machine left behind that were killed while they made the entry."""
    for old in folder.parent.glob(f".{folder.name}.{HOST}.*.making"):
        maker = old.name.removeprefix(f".{folder.name}.{HOST}.").partition(".")[0]
        if maker.isdigit() and not Path(f"/proc/{maker}").exists() and Path("/proc/self").exists():
            shutil.rmtree(old, ignore_errors=True)


def _keep(folder: Path, place: Path, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> bool:
    """Let a complete folder take its place. False where the disk refuses: work without."""
    try:
        for name, array in arrays.items():
            if not isinstance(array, np.memmap):  # empty: nothing to map
                np.save(place / f"{name}.npy", array, allow_pickle=False)
            sync(place / f"{name}.npy")
        about = {name: _about(array, isinstance(array, np.memmap)) for name, array in arrays.items()}
        write_json(place / FACTS, {"facts": facts, "arrays": about, "sum": _sum(facts, about)})
        try:
            os.rename(place, folder)
        except OSError:  # taken: another process was quicker, or what is there is damaged
            if _read(folder) is None:
                shutil.rmtree(folder)
                os.rename(place, folder)
    except (OSError, StoreError):
        return False
    return True
