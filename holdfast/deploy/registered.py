"""Which keys the SuperLink knows, as two files beside it, which `up` writes.

    registered.json   {fingerprint: id of the node, or "" if not admitted}; the proxy reads it
    suspended.json    {fingerprint: id of the node} of banned clients: the SuperLink keeps their keys, because
                      it takes no key twice, and the proxy admits none of them

So a ban needs no call of the SuperLink, and a client that is no longer banned comes back with its key."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.core.errors import RunError
from holdfast.core.files import write_json
from holdfast.core.reading import read_json
from holdfast.deploy.enrolment import Enrolment


class RegisteredKeys:
    """The two files. `register` and `unregister` call the SuperLink."""

    def __init__(
        self, server: Path, register: Callable[[str, set[str]], str], unregister: Callable[[str], None]
    ):
        self.file, self.suspended_file = _files(server)
        self.register, self.unregister = register, unregister

    def forget(self) -> None:
        """The SuperLink has a new database."""
        for file in (self.file, self.suspended_file):
            file.unlink(missing_ok=True)

    def follow(self, who: Enrolment) -> None:
        """Register the keys of admitted clients, suspend those of banned ones and remove all others. Each is
        noted at once: a stop in between may leave one node that is registered and not noted."""
        known, suspended = _read(self.file), _read(self.suspended_file)
        admitted = {m.fingerprint: m.key for m in who.members.values() if m.client in who.admitted}
        banned = {m.fingerprint for m in who.members.values() if m.banned is not None and not m.left}
        for fingerprint in [name for name, node in known.items() if node and name not in admitted]:
            if fingerprint in banned:  # first the id, which would be lost
                write_json(self.suspended_file, suspended := {**suspended, fingerprint: known[fingerprint]})
            else:
                self.unregister(known[fingerprint])
            write_json(self.file, known := {**known, fingerprint: ""})
        for fingerprint in [name for name in suspended if name not in banned]:
            node = suspended[fingerprint]
            if fingerprint in admitted:
                write_json(self.file, known := {**known, fingerprint: node})
            elif known.get(fingerprint) != node:
                self.unregister(node)
            suspended = {name: other for name, other in suspended.items() if name != fingerprint}
            write_json(self.suspended_file, suspended)
        for fingerprint, key in admitted.items():
            if fingerprint not in known:
                nodes = {*known.values(), *suspended.values()}
                write_json(self.file, known := {**known, fingerprint: self.register(key, nodes)})


def gone_for_good(server: Path, fingerprint: str) -> bool:
    """Return whether the SuperLink has removed this key: then its client needs a new one."""
    file, suspended = _files(server)
    return _read(file).get(fingerprint) == "" and fingerprint not in _read(suspended)


def _files(server: Path) -> tuple[Path, Path]:
    return server / "registered.json", server / "suspended.json"


def _read(file: Path) -> Mapping[str, str]:
    known = read_json(file) or {}
    if not all(isinstance(node, str) and re.fullmatch(r"\d{0,20}", node) for node in known.values()):
        raise RunError(f"{file} is damaged: it does not say which key is which node of the SuperLink")
    return known
