"""A full disk, in words: what fails of it first is never the same, and the codes and tracebacks of those that
fail do not name it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.core.errors import HoldfastError, RunError

_LITTLE = 50_000_000  # bytes: fewer than a database, a model and some logs want at once


def shortage(folder: Path) -> str | None:
    """One line if the disk that carries this folder is full, or nearly so."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    return (
        f"the disk that carries {folder} is full ({free / 1e6:.0f} MB are left); free some space"
        if free < _LITTLE
        else None
    )


@contextmanager
def naming_a_full_disk(folder: Path, then: Callable[[], str]) -> Iterator[None]:
    """What fails while this disk is full fails because of it. `then` says what to do when there is space
    again."""
    try:
        yield
    except (HoldfastError, OSError) as error:
        if line := shortage(folder):
            raise RunError(
                f"{line}, then {then()} (what failed: {' '.join(str(error).split())[:300]})"
            ) from None
        if isinstance(error, OSError) and error.errno in (
            errno.ENOSPC,
            errno.EDQUOT,
        ):  # a quota, or another disk
            raise RunError(
                f"no space is left for {error.filename or folder}; free some, then {then()}"
            ) from None
        raise
