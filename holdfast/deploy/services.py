"""What an operator needs to run server and nodes as services: units for systemd and a folder from which a
container image is built. They are written on demand and are the operator's from then on.

    systemd/holdfast-NAME.service            the server's unit
    nodes/3/holdfast-NAME-node3.service      the unit of one node, in its folder
    container/Containerfile                  one image for server and nodes
    container/requirements.txt               every package at the version that is installed here
    container/holdfast-VERSION-...whl        Holdfast as it is installed here"""

from __future__ import annotations

import base64
import hashlib
import platform
import re
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from importlib.resources import files
from pathlib import Path

from packaging.requirements import Requirement

from holdfast.core.files import write_atomically
from holdfast.core.version import __version__

_HOMES = "/var/lib/holdfast"
_LEFT_OUT = ("__pycache__", ".mypy_cache")


def write_server_unit(folder: Path, name: str) -> Path:
    """Write the unit of a server into its federation's folder."""
    unit = folder / "systemd" / f"holdfast-{_plain(name)}.service"
    unit.parent.mkdir(exist_ok=True)
    home = f"{_HOMES}/{_plain(name)}"
    return _write_unit(unit, name, "server", home, f"up {home} --server-only", "holdfast")


def write_node_unit(folder: Path, name: str, client: int) -> Path:
    """Write the unit of a node into the node's folder."""
    unit = folder / f"holdfast-{_plain(name)}-node{client}.service"
    home = f"{_HOMES}/{_plain(name)}-node{client}"
    return _write_unit(unit, name, f"node of client {client}", home, f"node {home}", "holdfast-node")


def has_units(folder: Path) -> bool:
    """Return whether this federation was made with units, so that new nodes get one too."""
    return (folder / "systemd").is_dir()


def write_container(folder: Path, name: str, port: int) -> Path:
    """Write the folder from which an image for server and nodes is built. It needs nothing else of this
    machine."""
    folder = folder / "container"
    folder.mkdir(exist_ok=True)
    wheel = write_wheel(folder)
    pins = "".join(f"{name}=={version}\n" for name, version in sorted(installed("holdfast", {"flower"})))
    write_atomically(folder / "requirements.txt", pins.encode())
    words = {
        "NAME": _plain(name),
        "PORT": str(port),
        "PYTHON": platform.python_version(),
        "VERSION": __version__,
        "WHEEL": wheel.name,
    }
    write_atomically(folder / "Containerfile", _filled("Containerfile", words).encode())
    return folder


def installed(name: str, extras: set[str]) -> Iterator[tuple[str, str]]:
    """Return all packages that one needs with these extras, at the versions that are installed here; not the
    package itself. A build for one device has a suffix in its version, which is left out."""
    seen: set[tuple[str, frozenset[str]]] = set()
    out: dict[str, str] = {}
    waiting = [(name, frozenset(extras))]
    while waiting:
        asked = waiting.pop()
        if asked in seen:
            continue
        seen.add(asked)
        package = distribution(asked[0])
        if asked[0] != name:
            out[_normal(asked[0])] = package.version.partition("+")[0]
        for line in package.requires or ():
            need = Requirement(line)
            chosen = ({"extra": extra} for extra in ("", *sorted(asked[1])))
            if need.marker is None or any(need.marker.evaluate(environment) for environment in chosen):
                waiting.append((need.name, frozenset(need.extras)))
    return iter(out.items())


def write_wheel(folder: Path) -> Path:
    """Pack Holdfast as it is installed here, so that a machine without this one's sources can install it."""
    package = distribution("holdfast")
    wheel, info = folder / f"holdfast-{__version__}-py3-none-any.whl", f"holdfast-{__version__}.dist-info"
    contents = {**_sources(), **_described(package, info)}
    lines = [
        f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in sorted(contents.items())
    ]
    contents[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in contents.items():
            packed.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content)
    return wheel


def _sources() -> dict[str, bytes]:
    root = Path(sys.modules["holdfast"].__path__[0])
    return {
        f"holdfast/{file.relative_to(root).as_posix()}": file.read_bytes()
        for file in sorted(root.rglob("*"))
        if file.is_file() and not set(_LEFT_OUT) & set(file.relative_to(root).parts)
    }


def _described(package: Distribution, info: str) -> dict[str, bytes]:
    kind = "Wheel-Version: 1.0\nGenerator: holdfast\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    metadata = (
        package.read_text("METADATA") or f"Metadata-Version: 2.1\nName: holdfast\nVersion: {__version__}\n"
    )
    scripts = package.read_text("entry_points.txt") or "[console_scripts]\nholdfast = holdfast.cli:main\n"
    texts = {"METADATA": metadata, "WHEEL": kind, "entry_points.txt": scripts}
    return {f"{info}/{name}": text.encode() for name, text in texts.items()}


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _write_unit(unit: Path, name: str, what: str, home: str, command: str, user: str) -> Path:
    words = {
        "NAME": _plain(name),
        "WHAT": what,
        "USER": user,
        "HOME": home,
        "UNIT": unit.name,
        "PLACE": f"{unit.parent.name}/{unit.name}" if unit.parent.name == "systemd" else unit.name,
        "COMMAND": command,
        "VERSION": __version__,
    }
    write_atomically(unit, _filled("unit.service", words).encode())
    return unit


def _filled(template: str, words: dict[str, str]) -> str:
    text = (files("holdfast.deploy") / "templates" / template).read_text()
    text = text.replace("HOME=HOME", f"HOME={words['HOME']}") if "HOME" in words else text
    return re.sub(r"\b(" + "|".join(words) + r")\b(?!=)", lambda found: words[found[1]], text)


def _plain(name: str) -> str:
    """Return a name that units and images may have."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "federation"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
