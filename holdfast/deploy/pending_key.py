"""A new key of a node, made on the node while the old one is still in use.

    NODE/key.new      made by `holdfast federation key NODE --new`, its public half is in key.new.pub
    NODE/key.old      the key before

The node goes on with `key` until the server refuses it, because the operator has enrolled the new one. Then
it takes the other key and, if that is refused too, the first again: a ban refuses both until it is
removed."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.core.errors import ConfigError
from holdfast.core.files import write_atomically
from holdfast.core.reading import last_lines
from holdfast.deploy.keys import make_key, public_of, write_node_public

_REFUSED = ("[code: 2004]", "Invalid SuperNode authentication")
"""What a SuperNode prints when the server does not know its key (any more)."""
_LINES = 60


def make_pending_key(folder: Path, client: int) -> str:
    """Make key.new; return its public half, which the server's operator enrols."""
    if not (folder / "key").exists():
        raise ConfigError(f"{folder} has no key yet; leave out --new")
    if (folder / "key.new").exists():
        raise ConfigError(
            f"{folder / 'key.new'} is not enrolled yet; enrol {folder / 'key.new.pub'}, or remove both files"
        )
    make_key(folder / "key.new")
    public = f"{public_of(folder / 'key.new')} client-{client}"
    write_atomically(folder / "key.new.pub", (public + "\n").encode())
    return public


def was_refused(log: Path, since: int = 0) -> bool:
    """Return whether a SuperNode that has stopped printed that the server refuses its key. `since` are the
    bytes of the log before it started."""
    try:
        if log.stat().st_size <= since:
            return False
        return any(mark in line for line in last_lines(log, _LINES) for mark in _REFUSED)
    except FileNotFoundError:
        return False


def take_other_key(folder: Path, client: int) -> bool:
    """Take the new key, or else the old one back; return False where there is only one."""
    key, new, old = (folder / name for name in ("key", "key.new", "key.old"))
    if new.exists():
        old.unlink(missing_ok=True)
        os.link(key, old)  # at no moment is there no key
        os.replace(new, key)
        (folder / "key.new.pub").unlink(missing_ok=True)
    elif old.exists():
        spare = folder / "key.swapping"
        spare.unlink(missing_ok=True)
        os.link(key, spare)
        os.replace(old, key)
        os.replace(spare, old)
    else:
        return False
    write_node_public(folder, f"client-{client}")
    return True
