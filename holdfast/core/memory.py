"""The memory of this machine and of this process."""

from __future__ import annotations

import ctypes
import os

from holdfast.core.errors import ConfigError

_LIBC = ctypes.CDLL(None)


def give_back_memory() -> None:
    """Return freed memory to the system. glibc keeps what a stack has freed, in pieces that the aligned
    tensors of the next stack often do not fit; without this call, memory grows with the number of stacks."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def physical_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def parse_bytes(text: str, setting: str) -> int:
    """Convert '2GB', '500 MB' or '1.5GiB' to bytes."""
    units = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "b": 1}
    cleaned = text.strip().lower().replace(" ", "")
    for unit in sorted(units, key=len, reverse=True):
        if cleaned.endswith(unit):
            try:
                amount = float(cleaned.removesuffix(unit)) * units[unit]
            except ValueError:
                break
            if 1 <= amount < 2**63:
                return int(amount)
    raise ConfigError(f"{setting}: '{text}' is not an amount of memory; write for example 2GB")
