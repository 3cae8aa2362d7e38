"""What the C library does with memory that is freed."""

from __future__ import annotations

import ctypes
import os

_LIBC = ctypes.CDLL(None)


def give_back_memory() -> None:
    """glibc keeps what a stack has freed, in pieces that the next one's aligned tensors often do not fit:
    without this, a cohort of many stacks grows as if nothing were ever freed."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def physical_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
