"""A federation's folder, as `holdfast federation init` writes it.

    federation.toml      how the federation is run (FederationSettings)
    experiment.toml      what is trained; server and nodes have the same copy
    README.md            the operator's commands
    systemd/, container/ units, and a folder from which an image is built, where they were asked for
    server/              stays on the server: authority, certificate, secret, orders.key, ledger.jsonl,
                         ledger.head, superlink.db, logs/,
                         run/ (the run directory)
    nodes/3/             goes to the machine of client 3, and nowhere else: node.toml, key, key.pub, ca.pem,
                         server.pub, experiment.toml

A node's private key is made here with its folder, or on the node itself: then the server is given its public
half only."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError, field_validator

from holdfast.core.errors import ConfigError
from holdfast.core.files import expand, write_atomically
from holdfast.core.reading import read_toml, read_whole
from holdfast.core.registry import explain, load_plugin, setting
from holdfast.core.toml import to_toml
from holdfast.deploy.enrolment import Enrolment
from holdfast.deploy.keys import (
    make_authority,
    make_node_key,
    make_secret,
    make_server_certificate,
    node_public,
)
from holdfast.deploy.ledger import Ledger
from holdfast.deploy.ledger_keeping import ready_ledger
from holdfast.deploy.services import has_units, write_container, write_node_unit, write_server_unit
from holdfast.experiment.config import Config, Section
from holdfast.privacy.settings import PrivacySettings

_PRIVATE = 0o700
"""Mode of the folders of server and nodes: updates, logs and private models are readable by their owner
only."""


class FederationSettings(Section):
    """federation.toml."""

    name: str = setting("federation", "name of the federation")
    address: str = setting(
        "127.0.0.1:8443", "where nodes reach the server: host:port of the fleet-only proxy"
    )
    listen: str = setting("127.0.0.1", "the address the proxy binds; 0.0.0.0 for nodes on other machines")
    deadline: float = setting(300.0, "seconds that a client has for a request", gt=0)
    join: float = setting(300.0, "seconds to wait for all clients at the start", ge=0)
    quorum: float = setting(
        0.5,
        "share of the clients asked that must answer before a round continues without the others",
        ge=0,
        le=1,
    )
    wait: float = setting(600.0, "seconds to wait for a quorum before the run stops", ge=0)
    strikes: int = setting(3, "invalid replies after which their sender is banned; 0: never", ge=0)
    largest: int = setting(64_000_000, "bytes of one request through the proxy", gt=0)
    objects: int = setting(
        1000, "objects that one reply may consist of; a model travels in pieces of 5 MB", ge=100
    )
    quota: int = setting(2_000_000_000, "bytes of replies that a node may send in a round", gt=0)
    metrics: int = setting(0, "port of Prometheus metrics on 127.0.0.1; 0: none", ge=0, le=65535)
    plugins: tuple[str, ...] = setting((), "Python files in this folder whose parts the experiment names")

    @field_validator("address")
    @classmethod
    def _host_and_port(cls, address: str) -> str:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError("must be host:port")
        return address

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


class NodeSettings(Section):
    """nodes/3/node.toml."""

    client: int = setting(0, "which client this node is; the server knows it by its key", ge=0)
    superlink: str = setting("127.0.0.1:8443", "where the server is reached")
    state: str = setting("state", "folder for what never leaves this node")
    experiment: str = setting("experiment.toml", "this node's copy of what is trained")
    data: str = setting(
        "", "folder of Parquet files with this client's samples, where the experiment only declares its data"
    )
    function: str = setting("", "FILE.py:NAME, a function that gives them instead: (x, y) or Samples")
    plugins: tuple[str, ...] = setting(
        (), "this node's own copies of Python files whose parts the experiment names; the server sends none"
    )
    device: str = setting("cpu", "cpu, cuda, cuda:1, or auto: cuda where there is one")
    privacy: PrivacySettings | None = setting(None, "clip and noise what leaves; none: it is sent unchanged")
    resident: bool = setting(
        True, "keep a process that has the data in memory; otherwise every request loads it"
    )


@dataclass(frozen=True)
class Project:
    """A federation's folder on the server."""

    path: Path
    settings: FederationSettings

    @property
    def server(self) -> Path:
        return self.path / "server"

    @property
    def experiment(self) -> Path:
        return self.path / "experiment.toml"

    @property
    def run(self) -> Path:
        return self.server / "run"

    @property
    def logs(self) -> Path:
        return self.server / "logs"

    @property
    def ledger_file(self) -> Path:
        return self.server / "ledger.jsonl"

    @property
    def server_public(self) -> Path:
        """The public half of the key that signs orders and heads; every node has a copy, as server.pub."""
        return self.server / "orders.pub"

    def ledger(self) -> Ledger:
        return Ledger(self.ledger_file)

    def ready_ledger(self) -> Ledger:
        """Return the ledger after checking that it is the newest; call it before starting or deciding
        anything."""
        ledger = ready_ledger(self.ledger_file, self.run)
        self.share_server_key(only_missing=True)  # an older federation had no server key
        return ledger

    def share_server_key(self, only_missing: bool = False) -> None:
        """Give the nodes whose folders are here the public half of the server's key."""
        for file in (self.path / "nodes").glob("*/node.toml"):
            if not only_missing or not (file.parent / "server.pub").exists():
                write_atomically(file.parent / "server.pub", self.server_public.read_bytes())

    def node(self, client: int) -> Path:
        return self.path / "nodes" / str(client)

    @property
    def plugins(self) -> list[Path]:
        return plugin_files(self.path, self.settings.plugins)

    def check_experiment(self) -> Config:
        """Read the experiment; raise an error if a federation cannot run it."""
        from holdfast.deploy.node import federated

        for plugin in self.plugins:
            load_plugin(plugin)
        return federated(self.experiment)


def plugin_files(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the paths of the plug-ins that a folder's settings name."""
    return [folder / expand(name, "plugins") for name in names]


def open_project(path: Path) -> Project:
    return Project(
        Path(path).absolute(), FederationSettings(**_read(Path(path) / "federation.toml", FederationSettings))
    )


def open_node(path: Path) -> NodeSettings:
    return NodeSettings(**_read(Path(path) / "node.toml", NodeSettings))


_WRITTEN_BY = {
    "federation.toml": "`holdfast federation init DIR` writes a new federation",
    "node.toml": (
        "copy the node's folder here as `holdfast federation init` or `enrol` wrote it, or start with"
        " --server-only"
    ),
}


def _read(file: Path, kind: type[Section]) -> dict[str, Any]:
    try:
        table = read_toml(file)
        kind(**table)
    except FileNotFoundError:
        raise ConfigError(f"no {file.name} in {file.parent}; {_WRITTEN_BY[file.name]}") from None
    except ValidationError as error:
        raise ConfigError(explain(error, kind, file.stem)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    return table


def init(
    path: Path,
    clients: int,
    hosts: Sequence[str] = (),
    port: int = 8443,
    experiment: Path | None = None,
    plugins: Sequence[Path] = (),
    node_keys: bool = True,
    systemd: bool = False,
    container: bool = False,
) -> Project:
    """Write a whole federation; existing files are not overwritten. Plug-ins are copied: server and nodes
    have their own. Without `node_keys` no client is enrolled yet: every node makes its key itself."""
    from holdfast.deploy.node import expected, federated

    path = Path(path).absolute()
    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"{path} is not empty; choose a new folder")
    try:
        text = (
            _template("experiment.toml").replace("CLIENTS", str(clients)).encode()
            if experiment is None
            else _for_clients(read_whole(experiment), clients)
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{experiment} cannot be read: {error}") from None
    for folder in (path / "server", path / "nodes"):
        folder.mkdir(parents=True, mode=_PRIVATE)
    write_atomically(path / "experiment.toml", text)
    try:
        for plugin in plugins:
            _copy(plugin, path)
            load_plugin(path / plugin.name)
        if expected(federated(path / "experiment.toml")) != clients:
            raise ConfigError(
                f"data.clients: {experiment} is for {expected(federated(path / 'experiment.toml'))} clients,"
                f" not {clients}"
            )
    except ConfigError:
        shutil.rmtree(path)
        raise
    host = hosts[0] if hosts else "127.0.0.1"
    settings = FederationSettings(
        name=path.name,
        address=f"{host}:{port}",
        listen="0.0.0.0" if hosts else "127.0.0.1",
        plugins=tuple(p.name for p in plugins),
    )
    about = {name: field.description for name, field in FederationSettings.model_fields.items()}
    lines = [
        f"{line}  # {about[line.partition(' =')[0]]}"
        for line in to_toml(settings.model_dump()).splitlines()
        if line
    ]
    write_atomically(path / "federation.toml", ("\n".join(lines) + "\n").encode())
    make_authority(path / "server", settings.name)
    make_server_certificate(path / "server", hosts)
    make_secret(path / "server" / "superexec.secret")
    project = Project(path, settings)
    project.ready_ledger()
    if systemd:
        write_server_unit(path, settings.name)
    if container:
        write_container(path, settings.name, settings.port)
    for client in range(clients) if node_keys else ():
        enrol(project, client)
    readme = (
        _template("README.md")
        .replace("NAME", settings.name)
        .replace("ADDRESS", settings.address)
        .replace("CLIENTS", str(clients))
    )
    write_atomically(path / "README.md", readme.encode())
    write_atomically(path / ".gitignore", b"server/\nnodes/\n")
    return project


def enrol(project: Project, client: int, public: str | None = None) -> None:
    """Write the folder of a node, with a new key; or without a private one, where the node has made its key
    and sends the public half. The server keeps the public half; an earlier key of the client is rejected from
    then on."""
    if client < 0:
        raise ConfigError(f"client {client}: clients are numbered from 0")
    ledger, folder = project.ready_ledger(), project.node(client)
    who, comment = Enrolment.of(ledger.entries), f"client-{client}@{project.settings.name}"
    if public is not None:
        public = f"{node_public(public)} {comment}"
        fingerprint = who.check_new(client, public)  # before anything is touched
        if client in who.members and fingerprint == who.members[client].fingerprint:
            raise ConfigError(
                f"client {client} has this key already; make a new one on the node: `holdfast federation key`"
            )
    folder.mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
    for old in ("key", "key.pub"):
        (folder / old).unlink(missing_ok=True)
    if public is None:
        public = make_node_key(folder, comment)
    else:
        write_atomically(folder / "key.pub", (public + "\n").encode())
    write_atomically(folder / "ca.pem", (project.server / "ca.pem").read_bytes())
    write_atomically(folder / "server.pub", project.server_public.read_bytes())
    write_atomically(folder / "experiment.toml", project.experiment.read_bytes())
    for plugin in project.plugins:
        _copy(plugin, folder)
    node = NodeSettings(
        client=client,
        superlink=project.settings.address,
        plugins=tuple(plugin.name for plugin in project.plugins),
    )
    if not (folder / "node.toml").exists():
        write_atomically(folder / "node.toml", to_toml(node.model_dump()).encode())
    if has_units(project.path):
        write_node_unit(folder, project.settings.name, client)
    ledger.append("rotate" if client in who.members else "enrol", client, key=public)
    ledger.sign()


def _copy(plugin: Path, folder: Path) -> None:
    if not plugin.is_file():
        raise ConfigError(f"plugins: there is no file {plugin}")
    write_atomically(folder / plugin.name, plugin.read_bytes())


def _for_clients(content: bytes, clients: int) -> bytes:
    """Return an experiment with this number of clients, where it names none; otherwise as it is."""
    text = content.decode()
    table = tomllib.loads(text)
    if "clients" in table.get("data", {}):
        return content
    section = re.search(r"(?m)^[ \t]*\[[ \t]*data[ \t]*\][^\n]*$", text)
    if section is not None:
        return f"{text[: section.end()]}\nclients = {clients}{text[section.end() :]}".encode()
    if "data" in table:  # as an inline table or by dotted keys
        raise ConfigError(f"data.clients: the experiment names no number of clients; write {clients} there")
    return f"{text.rstrip()}\n\n[data]\nclients = {clients}\n".encode()


def _template(name: str) -> str:
    return (files("holdfast.deploy") / "templates" / name).read_text()
