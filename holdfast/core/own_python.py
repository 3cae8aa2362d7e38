"""Starting a process of this Python that runs a function of Holdfast. Unlike with multiprocessing, the user's
script is not run again, and threads of this process do no harm."""

from __future__ import annotations

import os
import sys


def command(module: str, function: str) -> list[str]:
    """A command line that calls a function without arguments."""
    return [sys.executable, "-c", f"from {module} import {function}; {function}()"]


def variables() -> dict[str, str]:
    """The environment in which it finds what this process finds."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }
