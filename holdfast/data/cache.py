"""Cache decoded arrays as .npy files, so that a dataset is decoded once and then mapped into memory.

Arrays are decoded straight into the files and read from them page by page, so a dataset may be larger than
memory. The folder is ~/.cache/holdfast, or HOLDFAST_CACHE. The cache only saves time: where it cannot be
written or is damaged, the arrays are made again.
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
from holdfast.core.files import HOST, as_json, sync, write_json
from holdfast.core.reading import parse_json, read_whole

ENVIRONMENT = "HOLDFAST_CACHE"
FORMAT = 3  # raise this when the same files are decoded differently
FACTS = "facts.json"
_PRIVATE = 1 << 29  # bytes of an array that is mapped with private pages
_SUMMED = 1 << 24  # bytes of an array that has a checksum: labels and users of two million rows

Shape = tuple[int, ...]
New = Callable[[str, Shape, Any], np.ndarray]


@dataclass(frozen=True, eq=False)
class CachedArrays:
    """The arrays that were made, which may only be read, and small facts that JSON can hold."""

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]


def cached(name: str, inputs: Sequence[Path], make: Callable[[New], Mapping[str, Any]]) -> CachedArrays:
    """Return what `make` makes of these files; it is made again when the name, or a file's path, size or time
    of change, differs.

    `make(new)` fills arrays that it gets from new(array_name, shape, dtype), and returns the facts. The name
    begins with the dataset's name and continues with every setting that affects the result.
    """
    folder = _folder(name, inputs)
    found = _read(folder) if folder else None
    if found is not None:
        return found
    with _making(folder) as place:
        maker = _Maker(place)
        facts = json.loads(as_json(make(maker.new)))  # as they will be read back
        if folder and place and not maker.refused and _keep(folder, place, maker.arrays, facts):
            return _read(folder) or CachedArrays(maker.arrays, facts)
        return CachedArrays(maker.arrays, facts)


def cache_folder() -> Path | None:
    """Return the cache folder, or None where there is no home directory."""
    try:
        return Path(os.environ.get(ENVIRONMENT) or "~/.cache/holdfast").expanduser()
    except RuntimeError:
        return None


class _Maker:
    """Provides arrays to fill: mapped files, or memory where the folder cannot be written."""

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
                    f" {ENVIRONMENT} to a folder with enough space"
                ) from None
        self.arrays[name] = array
        return array

    def _mapped(self, name: str, shape: Shape, dtype: np.dtype) -> np.ndarray | None:
        if self.place is None or not np.prod(shape):
            return None
        path = self.place / f"{name}.npy"
        try:
            array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
            # a full disk must be an error here, not a SIGBUS when a page is written
            with open(path, "r+b") as file:
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
    """Read an entry; None unless all files are there and pass the quick checks."""
    try:
        stored = parse_json(read_whole(folder / FACTS))
        facts, about = stored["facts"], stored["arrays"]
        arrays = {name: _load(folder / f"{name}.npy", one) for name, one in about.items()}
        found = {name: _about(array, about[name]["mapped"]) for name, array in arrays.items()}
        sound = found == about and stored["sum"] == _sum(facts, about)
    except Exception:  # damaged files can make JSON and NumPy raise anything
        return None
    return CachedArrays(arrays, facts) if sound else None


def _about(array: np.ndarray, mapped: bool) -> dict[str, Any]:
    """Describe an array as it must be when it is read again. The values of large arrays are not checked: that
    would take as long as reading them."""
    values = zlib.crc32(np.ascontiguousarray(array).data) if array.nbytes <= _SUMMED else None
    return {"mapped": mapped, "shape": list(array.shape), "dtype": array.dtype.str, "values": values}


def _sum(facts: Mapping[str, Any], about: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps([facts, about], sort_keys=True).encode())


def _load(path: Path, about: Mapping[str, Any]) -> np.ndarray:
    """Load one array. Small arrays get private pages: what a plug-in writes there by mistake can be detected
    and never reaches the file. Large arrays are mapped read-only, where such a mistake ends the process,
    because the system refuses private pages for more than memory holds."""
    if not path.is_file():  # opening a pipe would block
        raise ValueError(f"{path} is not a file")
    if about["mapped"]:
        return np.load(path, mmap_mode="r" if path.stat().st_size > _PRIVATE else "c", allow_pickle=False)
    # only empty arrays are not mapped; reading one would allocate as much memory as the file claims
    if 0 not in about["shape"]:
        raise ValueError(f"{path} is not empty")
    return np.empty(about["shape"], about["dtype"])


@contextlib.contextmanager
def _making(folder: Path | None) -> Iterator[Path | None]:
    """Make a folder beside the entry, which becomes the entry when it is complete; None where it cannot be
    made. It is removed if it is still there at the end."""
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
    """Remove what killed processes of this machine left behind while they made the entry."""
    for old in folder.parent.glob(f".{folder.name}.{HOST}.*.making"):
        maker = old.name.removeprefix(f".{folder.name}.{HOST}.").partition(".")[0]
        if maker.isdigit() and not Path(f"/proc/{maker}").exists() and Path("/proc/self").exists():
            shutil.rmtree(old, ignore_errors=True)


def _keep(folder: Path, place: Path, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> bool:
    """Move a complete folder to its final name. Return False where the disk refuses; the caller then works
    without the cache."""
    try:
        for name, array in arrays.items():
            if not isinstance(array, np.memmap):  # empty arrays are not mapped
                np.save(place / f"{name}.npy", array, allow_pickle=False)
            sync(place / f"{name}.npy")
        about = {name: _about(array, isinstance(array, np.memmap)) for name, array in arrays.items()}
        write_json(place / FACTS, {"facts": facts, "arrays": about, "sum": _sum(facts, about)})
        try:
            os.rename(place, folder)
        except OSError:  # it exists: another process was faster, or the entry there is damaged
            if _read(folder) is None:
                shutil.rmtree(folder)
                os.rename(place, folder)
    except (OSError, StoreError):
        return False
    return True
