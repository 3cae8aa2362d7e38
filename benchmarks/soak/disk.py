"""A small disk that can be full, and what a power cut does to files that no commit names."""

from __future__ import annotations

import os
import random
import re
import subprocess
from contextlib import suppress
from pathlib import Path

from holdfast.storage.client_state import RowStore
from holdfast.storage.store import read_tensors


class SmallDisk:
    """A file system in memory; only root may mount one. Without it `reason` says so, and the folder is an
    ordinary one."""

    def __init__(self, path: Path, megabytes: int):
        self.path, self.reason = path, ""
        path.mkdir(parents=True)
        try:
            command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)]
            done = subprocess.run(command, capture_output=True, text=True)
            failed = done.stderr.strip() if done.returncode else ""
        except OSError as error:
            failed = str(error)
        if failed:
            self.reason = f"no small disk could be mounted ({failed.splitlines()[-1][:80]}); this needs root"

    def fill(self) -> None:
        with suppress(OSError), open(self.path / "filler", "ab", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass

    def free(self) -> None:
        (self.path / "filler").unlink(missing_ok=True)

    def remove(self) -> None:
        if not self.reason:
            subprocess.run(["umount", "--lazy", str(self.path)], capture_output=True)


def garble_unsealed(run: Path, committed: int | None, chance: random.Random) -> int:
    """What was written and not yet sealed is lost or rubbish after a power cut: files of later rounds than
    the committed one, temporary files, and records that no committed row uses. Returns how many files were
    changed."""
    changed = 0
    for file in [*run.glob("state/*"), *run.glob("parts/*"), *run.rglob(".*.writing")]:
        number = re.fullmatch(r"(\d{6,10})\.\w+", file.name)
        if number is None or committed is None or int(number[1]) > committed:
            changed += 1
            (
                file.unlink()
                if chance.random() < 0.5
                else file.write_bytes(chance.randbytes(file.stat().st_size // 2))
            )
    if committed is not None and (run / "rows" / "records").exists():
        changed += _garble_rows(run, committed, chance)
    return changed


def _garble_rows(run: Path, committed: int, chance: random.Random) -> int:
    place = RowStore(
        run / "rows", read_tensors(run / f"state/{committed:06d}.safetensors")["rows/index"]
    ).place
    if not place:
        return 0
    size = sum(value.nbytes for value in RowStore(run / "rows").room(1).values())
    used = set(place.values())
    with open(run / "rows" / "records", "r+b") as file:
        whole = os.fstat(file.fileno()).st_size // size
        free = [record for record in range(whole) if record not in used]
        for record in free:
            file.seek(record * size)
            file.write(chance.randbytes(size))
    return int(bool(free))
