"""Clear messages for a full disk: what fails first varies, and its exit codes and tracebacks do not name the
disk."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.core.errors import HoldfastError, RunError

_LITTLE = 50_000_000  # bytes; a database, a model and some logs need more


def shortage(folder: Path) -> str | None:
    """Return one line if the disk that holds this folder is full or nearly full."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    return (
        f"the disk that holds {folder} is full ({free / 1e6:.0f} MB left); free some space"
        if free < _LITTLE
        else None
    )


@contextmanager
def naming_a_full_disk(folder: Path, then: Callable[[], str]) -> Iterator[None]:
    """Explain errors that happen while this disk is full by the full disk. `then` says what to do when there
    is space again."""
    try:
        yield
    except (HoldfastError, OSError) as error:
        if line := shortage(folder):
            raise RunError(
                f"{line}, then {then()} (what failed: {' '.join(str(error).split())[:300]})"
            ) from None
        # A quota, or another disk.
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(
                f"no space is left for {error.filename or folder}; free some, then {then()}"
            ) from None
        raise
