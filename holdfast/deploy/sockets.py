"""The Unix sockets of trainers and of notices, in a folder that only their owner can open."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import tempfile
from pathlib import Path

from holdfast.core.errors import RunError


def _home() -> Path:
    """Not in the node's folder: the path of a Unix socket may have a hundred letters at most."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base if len(base) < 60 else "/tmp") / f"holdfast-{os.getuid()}"


def socket_of(folder: Path) -> Path:
    """Return the path of the socket of one node's trainer."""
    return _named(folder, ".sock")


def notices_of(folder: Path, receiver: str) -> Path:
    """Return the path of the socket on which this receiver gets its notices."""
    return _named(folder, f".{receiver}")


def _named(folder: Path, suffix: str) -> Path:
    home = _home()
    home.mkdir(mode=0o700, exist_ok=True)
    if not _is_ours(home):
        raise RunError(
            f"{home} belongs to another user or is open to others; remove it, or set XDG_RUNTIME_DIR"
        )
    return home / f"{hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:20]}{suffix}"


def _is_ours(home: Path) -> bool:
    """Return whether the folder belongs to this user and is closed to others; a link does not count."""
    about = home.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077


def listen(path: Path) -> socket.socket:
    """Return a listening socket. It gets its name only when it listens, so a socket that refuses connections
    is left over and may be removed."""
    listener, bound = socket.socket(socket.AF_UNIX), path.with_suffix(f".{os.getpid()}")
    bound.unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        listener.bind(str(bound))
    finally:
        os.umask(before)
    listener.listen(4)
    bound.replace(path)
    return listener


def remove_left_over() -> None:
    """Remove the sockets of killed processes, on which none listens."""
    home = _home()
    if not home.exists() or not _is_ours(home):
        return
    for path in (*home.glob("*.sock"), *home.glob("*.answered"), *home.glob("*.posted")):
        kind = socket.SOCK_STREAM if path.suffix == ".sock" else socket.SOCK_DGRAM
        with socket.socket(socket.AF_UNIX, kind) as line:
            line.setblocking(False)  # a busy one is in use
            try:
                line.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                pass
