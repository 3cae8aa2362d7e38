"""Files as one block of bytes: how a unit of a sweep travels between processes and machines.

A block is the length of a header, the header in JSON, and the files one after the other. Nothing in it is
pickled, and names of files are compared with those that are expected before anything is written."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from holdfast.core.errors import RunError
from holdfast.core.files import plain_disk_errors, write_atomically
from holdfast.core.reading import is_whole, parse_json

Files = dict[str, bytes]
"""The content of files by their path in the directory of a sweep."""


def pack(files: Mapping[str, bytes]) -> bytes:
    header = json.dumps([[name, len(content)] for name, content in files.items()]).encode()
    return b"".join([len(header).to_bytes(8, "little"), header, *files.values()])


def unpack(block: bytes) -> Files:
    """The files of a block; a block that was cut short or altered is an error."""
    try:
        start = 8 + int.from_bytes(block[:8], "little")
        sizes = parse_json(block[8:start])
        if not all(isinstance(name, str) and is_whole(size, most=2**50) for name, size in sizes):
            raise ValueError("its header is damaged")
        files: Files = {}
        for name, size in sizes:
            files[name] = block[start : start + size]
            start += size
        if start != len(block):
            raise ValueError("its length is not the one it names")
    except (ValueError, TypeError) as error:
        raise RunError(f"what a worker sent cannot be read: {error}") from None
    return files


def of_folder(folder: Path, cells: Collection[str], group: str | None) -> Files:
    """What another process needs to go on with these cells: their committed rounds, and their group's terms.
    The caller holds their locks, so nothing changes meanwhile."""
    files: Files = {}
    if group is not None and (folder / group).exists():
        files[group] = (folder / group).read_bytes()
    for name in cells:
        for file in _committed(folder / name):
            files[f"{name}/{file}"] = (folder / name / file).read_bytes()
    return files


def _committed(cell: Path) -> Iterator[str]:
    """The files of a cell that count, if it has begun."""
    if not (cell / "manifest.json").exists():
        return
    yield "manifest.json"
    if not (cell / "head.json").exists():
        return
    head = parse_json((cell / "head.json").read_bytes())
    last = int(head["round"])
    yield from (
        name for name in ("start.safetensors", "result.json", "failure.json") if (cell / name).exists()
    )
    yield from (f"rows/{name}" for name in ("fields.json", "records") if (cell / "rows" / name).exists())
    for file in sorted((cell / "parts").glob("[0-9]*.*")):
        if file.stem.isdecimal() and int(file.stem) <= last:
            yield f"parts/{file.name}"
    yield str(head["state"])
    yield "head.json"


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files into a new folder, which nobody else reads yet."""
    root = folder.resolve()
    for name, content in files.items():
        path = (folder / name).resolve()
        if root not in path.parents:
            raise RunError(f"a file that was sent has a name that leads out of its folder: {name}")
        with plain_disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def write_block(block: bytes, path: Path) -> None:
    """Write a block for another process of this machine, whole or not at all."""
    write_atomically(path, block)


def take_block(path: Path) -> bytes:
    """Read a block that another process wrote, and remove it."""
    content = path.read_bytes()
    os.unlink(path)
    return content
