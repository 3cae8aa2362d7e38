"""Performs requests on a node: in the resident trainer, which keeps the data in memory, or where there is
none in the process that talks to the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict

from holdfast.core.errors import ConfigError
from holdfast.core.files import expand
from holdfast.core.reading import read_whole
from holdfast.core.registry import load_plugin
from holdfast.core.screening import FEDERATION_NORM_CAP
from holdfast.data.node_data import from_folder, from_function
from holdfast.data.samples import Samples
from holdfast.data.sources.declared import Declared
from holdfast.deploy import wire
from holdfast.deploy.node import Node, declared_in, federated
from holdfast.deploy.privacy import Guard
from holdfast.deploy.project import NodeSettings, open_node, plugin_files
from holdfast.experiment.config import Config
from holdfast.experiment.planner import pick_device
from holdfast.privacy.settings import PrivacySettings


class NodeWorker:
    """Performs tasks, and keeps the last world in memory: building it, the data above all, takes longer than
    most tasks."""

    def __init__(self) -> None:
        self.about: tuple[Any, ...] = ()
        self.node: Node | None = None

    def perform(
        self, content: RecordDict, node: Mapping[str, Any], run: Mapping[str, Any], attempt: str
    ) -> RecordDict:
        """Perform one task. `node` and `run` are the settings of SuperNode and run; `attempt` names this
        start of the server."""
        client, header = int(_setting(node, "client-id")), wire.read_header(content)
        path = Path(str(node["config"] if "config" in node else run["config"]))
        folder = Path(str(_setting(node, "state-dir"))) / header.run / str(client)
        own = NodeHome.of(node)
        about = (read_whole(path), client, folder, header.world, header.threads, own)
        if self.node is None or about != self.about:
            if own is not None:
                own.load_plugins()
            config = federated(path)
            guard = guard_of(None if own is None else own.settings.privacy, folder.parents[1], config)
            bring = own.bring if own is not None and own.brings else None
            device = None if own is None else own.device
            self.node, self.about = (
                Node(config, client, folder, header.world, header.threads, bring, guard, device),
                about,
            )
        self.node.enter(header.round)
        exchange = wire.read_exchange(
            content, header, client, self.node.run_context.wire().size, self.node.run_context.network.dtype
        )
        return wire.pack_fields(self.node.perform(exchange, header.committed, attempt))


@dataclass(frozen=True)
class NodeHome:
    """A node's own folder: its data, how it is trained here, and what may leave it."""

    home: Path
    settings: NodeSettings

    @staticmethod
    def of(node: Mapping[str, Any]) -> NodeHome | None:
        home = Path(str(node["home"])) if node.get("home") else None
        return None if home is None else NodeHome(home, open_node(home))

    @property
    def brings(self) -> bool:
        return bool(self.settings.data or self.settings.function)

    def bring(self, declared: Declared) -> Samples:
        if self.settings.data and self.settings.function:
            raise ConfigError(
                "node.toml: data and function are two sources of the same samples; remove one of them"
            )
        if self.settings.data:
            return from_folder(self.home / expand(self.settings.data, "data"), declared)
        file, _, name = self.settings.function.rpartition(":")
        return from_function(f"{self.home / expand(file, 'function')}:{name}", declared)

    @property
    def device(self) -> torch.device:
        name = self.settings.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            return pick_device(name)
        except ConfigError as error:
            raise ConfigError(f"node.toml: {str(error).removeprefix('engine.')}") from None

    def load_plugins(self) -> None:
        for file in plugin_files(self.home, self.settings.plugins):
            load_plugin(file)


def guard_of(own: PrivacySettings | None, state: Path, config: Config) -> Guard | None:
    """The guard of a node, by its node.toml or by the experiment, where one of them has [privacy]. Both must
    ask for the same: neither the owner's settings nor the experiment's are weakened without notice."""
    privacy, declared = own or config.privacy, declared_in(config)
    if privacy is None:
        return None
    if config.privacy is not None and privacy != config.privacy:
        raise ConfigError(
            "node.toml: [privacy] differs from the experiment's [privacy]; make them equal, or leave one of"
            " them out"
        )
    if privacy.of_samples and config.privacy is None:
        raise ConfigError(
            'node.toml: privacy.level = "sample" changes the training of all clients; set it in the'
            " experiment"
        )
    if privacy.accounting == "poisson":
        raise ConfigError(
            'privacy.accounting: "poisson" is for simulations; in a federation the server knows the order of'
            " the batches"
        )
    if (
        declared is not None
        and privacy.others == "withhold"
        and not declared.least <= privacy.count <= declared.most
    ):
        raise ConfigError(
            f"privacy.count: {privacy.count} is outside the declared range {declared.least} to"
            f" {declared.most}"
        )
    return Guard(
        privacy, state, FEDERATION_NORM_CAP if config.train.norm_cap is None else config.train.norm_cap
    )


def _setting(settings: Mapping[str, Any], name: str) -> Any:
    if name not in settings:
        raise ValueError(f"this SuperNode has no {name}; start it with --node-config '{name}=...'")
    return settings[name]
