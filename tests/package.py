"""The package as users get it: built from a copy of the repository, installed into an empty environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def outside(**variables: str) -> dict[str, str]:
    """The environment of a command that must not find the repository."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | variables


def shell(*words: object, cwd: Path, **variables: str) -> str:
    """What a command prints; a command that fails is shown by the end of what it printed."""
    called = [str(word) for word in words]
    done = subprocess.run(called, cwd=cwd, env=outside(**variables), text=True, capture_output=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def build(folder: Path) -> Path:
    """What `make dist` builds: the source archive, and the wheel from the archive. Built from a copy, because
    a build writes beside its sources."""
    pytest.importorskip("build", reason="the package is built by build: pip install -e '.[dev]'")
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "site", "*.egg-info")
    shutil.copytree(ROOT, folder / "source", ignore=left_out)
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", ".")
    shell(*build, cwd=folder / "source")
    return folder / "dist"


def only(folder: Path, pattern: str) -> Path:
    """The file of a folder that fits a pattern; it is an error if there are several."""
    (found,) = folder.glob(pattern)
    return found


def empty_environment(folder: Path, wheel: Path) -> Path:
    """Install a wheel into an empty environment, with the dependencies of this one to save time. Returns its
    Python."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps")
    shell(*pip, wheel, cwd=folder)
    # A path in a .pth file is searched; .pth files in it, such as that of an editable holdfast, are not read.
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(shell(python, "-c", ask, cwd=folder).strip())
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python
