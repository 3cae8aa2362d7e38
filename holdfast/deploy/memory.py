"""Memory that the C library keeps after it was freed."""

from __future__ import annotations

import ctypes

_LIBC = ctypes.CDLL(None)


def give_back_memory() -> None:
    """Give memory that is free back to the system; glibc keeps it. A node mostly waits."""
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)
