"""What a node does with a request, in whichever process: the ClientApp's own, or the resident trainer that keeps the world in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from holdfast.deploy import wire
from holdfast.deploy.node import Node, federated


class Workshop:
    """The last world that was asked for is kept: building it, the data above all, takes longer than most tasks."""

    def __init__(self) -> None:
        self.about: tuple[Any, ...] = ()
        self.node: Node | None = None

    def perform(self, content: RecordDict, node: Mapping[str, Any], run: Mapping[str, Any], attempt: str) -> RecordDict:
        """One task. `node` and `run` are the settings of SuperNode and run; `attempt` names this start of the server."""
        client, header = int(_setting(node, "client-id")), wire.read_header(content)
        path = Path(str(node.get("config", run["config"])))
        folder = Path(str(_setting(node, "state-dir"))) / header.run / str(client)
        about = (path.read_bytes(), client, folder, header.world, header.threads)
        if self.node is None or about != self.about:
            self.node, self.about = Node(federated(path), client, folder, header.world, header.threads), about
        self.node.enter(header.round)
        exchange = wire.read_exchange(content, header, client, self.node.cell.wire().size, self.node.cell.network.dtype)
        return wire.pack_fields(self.node.perform(exchange, header.committed, attempt))


def _setting(settings: Mapping[str, Any], name: str) -> Any:
    if name not in settings:
        raise ValueError(f"this SuperNode has no {name}; start it with --node-config '{name}=...'")
    return settings[name]
