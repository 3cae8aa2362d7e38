"""The most memory a process has held: what Linux keeps count of, or what any Unix knows."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path


def forget_peak() -> None:
    """Count from what is held now, where the system allows it; else from the start of the process."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak(process: int | str = "self") -> int:
    """Bytes of the largest resident set of a process of this machine that is alive; 0 where nobody can
    say."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
    if process != "self":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
