"""The peak memory of a process, as Linux counts it, or as any Unix reports it."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path


def forget_peak() -> None:
    """Reset the peak to the memory held now, where the system allows it; else it counts from the start of the
    process."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak(process: int | str = "self") -> int:
    """Bytes of the largest resident set of a live process of this machine; 0 where it is unknown."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
    if process != "self":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
