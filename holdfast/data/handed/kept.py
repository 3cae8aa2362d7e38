"""Handed-over data in a run directory: one safetensors file, named by the digest of what it holds. A sweep
has it once, beside its cells."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import ConfigError, DataError, RunError
from holdfast.core.files import HOST, plain_disk_errors, sync
from holdfast.core.memory import physical_memory
from holdfast.core.reading import is_whole, parse_json
from holdfast.data.handed.content import SHOWN, Content, HandedOver

_DTYPES = {"|u1": "U8", "<f4": "F32", "<i4": "I32", "<i8": "I64"}
_ABOVE = 3  # folders above a run in which its data may lie: a sweep, and a comparison of methods


def file_name(digest: str) -> str:
    return f"data-{digest[:SHOWN]}.safetensors"


def keep_all(configs: Iterable[Any], folder: Path, say: Callable[[str], None]) -> None:
    """Write the data that these configs were handed into a folder, each once."""
    for handed in dict.fromkeys(config.data.options.get("samples") for config in configs):
        if isinstance(handed, HandedOver) and keep(handed, folder) is None:
            size = f"{handed.content().bytes / 1e9:,.2f} GB"
            say(
                f"the data ({size}) is not copied into {folder}, as keep asks; resume needs it again:"
                " holdfast.resume(path, data=...)"
            )


def keep(handed: HandedOver, folder: Path) -> Path | None:
    """Write the data into a folder, unless it is there or in a folder above, or is larger than its limit."""
    found = _find(handed.digest, folder)
    if found is not None and (
        found.parent == folder.absolute() or not (found.parent / "manifest.json").exists()
    ):
        return found  # not where it is that of another run, which may be moved away
    content = handed.content()
    if content.bytes > handed.keep:
        return None
    path = folder / file_name(handed.digest)
    _write(content, path)
    return path


def handed_in(config: Mapping[str, Any]) -> HandedOver | str | None:
    """What a config's data section holds of handed-over data: the samples, only their digest, or nothing."""
    data = config.get("data")
    options = data.get("options") if isinstance(data, Mapping) and data.get("name") == "arrays" else None
    found = options.get("samples") if isinstance(options, Mapping) else None
    return found if isinstance(found, (str, HandedOver)) else None


def is_missing(config: Mapping[str, Any], folder: Path) -> bool:
    """Whether a run was handed data of which its directory has no copy."""
    digest = handed_in(config)
    return isinstance(digest, str) and _find(digest, folder) is None


def with_data(config: Mapping[str, Any], folder: Path, given: Iterable[HandedOver] = ()) -> dict[str, Any]:
    """A config from a run directory with its handed-over data: what is given again, or else a copy in the
    directory, which is read when it is first used."""
    digest = handed_in(config)
    if not isinstance(digest, str):
        return dict(config)
    again = next((one for one in given if one.digest == digest), None)
    samples = again or HandedOver(digest, lambda: _read_from(digest, folder))
    data = config["data"]
    return {**config, "data": {**data, "options": {**data["options"], "samples": samples}}}


def check_given(configs: Iterable[Mapping[str, Any]], folder: Path, given: Iterable[HandedOver]) -> None:
    """Refuse data that is not what the runs of a directory began with."""
    digests = {digest for config in configs if isinstance(digest := handed_in(config), str)}
    for one in given:
        if not digests:
            raise ConfigError(f"{folder} did not begin with data that was handed over; leave data out")
        if one.digest not in digests:
            began = " and ".join(sorted(digest[:SHOWN] for digest in digests))
            raise ConfigError(
                f"{folder} began with data of digest {began}, but the data given has {one.short}; hand"
                f" over the same"
                " data, in the same order"
            )


def _read_from(digest: str, folder: Path) -> Content:
    path = _find(digest, folder)
    if path is None:
        raise DataError(
            f"{folder} holds no copy of its data (digest {digest[:SHOWN]}), which was handed over in"
            f" Python; give it again: holdfast.open({str(folder)!r}, data=...), or resume to continue"
        )
    content = read(path)
    if content.digest() != digest:
        raise RunError(f"{path} is damaged: its digest is not the one that the run began with")
    return content


def _find(digest: str, folder: Path) -> Path | None:
    folders: Iterable[Path] = [folder.absolute(), *folder.absolute().parents][: 1 + _ABOVE]
    return next((path for at in folders if (path := at / file_name(digest)).is_file()), None)


def _write(content: Content, path: Path) -> None:
    """Write a safetensors file, whole or not at all, without a copy of the arrays in memory."""
    header: dict[str, Any] = {"__metadata__": {"holdfast": json.dumps(content.facts())}}
    at = 0
    for name, array in content.arrays():
        header[name] = {
            "dtype": _DTYPES[array.dtype.newbyteorder("<").str],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(f".{path.name}.{HOST}.{os.getpid()}.writing")
    with plain_disk_errors(path):
        try:
            with open(temporary, "wb") as file:
                file.write(struct.pack("<Q", len(text)) + text)
                for _, array in content.arrays():
                    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync(path.parent)


def read(path: Path) -> Content:
    """Read the data of a run directory. The file may hold anything."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.stat().st_size > physical_memory():
            raise ValueError("it is larger than the memory")
        with safe_open(path, framework="numpy") as file:
            facts = parse_json((file.metadata() or {}).get("holdfast", ""))
            arrays = {name: file.get_tensor(name) for name in file.keys()}
        return _content(arrays, facts)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} cannot be read as data of a run: {str(error).splitlines()[0][:200]}"
        ) from None


def _content(arrays: Mapping[str, np.ndarray], facts: Any) -> Content:
    """Checked: what a damaged file holds must not fail later."""
    if not isinstance(facts, dict):
        raise ValueError("it has no description")
    sound = (
        facts.get("kind") in ("images", "numbers", "words", "table")
        and is_whole(facts.get("classes"), least=1)
        and is_whole(facts.get("train_rows"))
        and all(isinstance(facts.get(name), list) for name in ("class_names", "mean", "std"))
    )
    if not sound or any(arrays[name].dtype != np.int64 for name in ("y", "user") if name in arrays):
        raise ValueError("its description is damaged")
    return Content(
        arrays["x"],
        arrays["y"],
        arrays.get("user"),
        facts["kind"],
        facts["classes"],
        tuple(map(str, facts["class_names"])),
        facts["train_rows"],
        tuple(map(float, facts["mean"])),
        tuple(map(float, facts["std"])),
    )
