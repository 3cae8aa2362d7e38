"""The memory of this machine and of this process."""

from __future__ import annotations

import ctypes
import os

_LIBC = ctypes.CDLL(None)


def give_back_memory() -> None:
    """Return freed memory to the system. glibc keeps what a stack has freed, in pieces that the aligned
    tensors of the next stack often do not fit; without this call, memory grows with the number of stacks."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def physical_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
