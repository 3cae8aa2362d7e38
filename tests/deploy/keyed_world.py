"""A federation with keys whose apps run in one process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message

from holdfast.deploy.enrolment import Enrolment
from holdfast.deploy.keys import make_node_key, make_server_key
from holdfast.deploy.ledger import Ledger
from holdfast.deploy.server_app import serve
from tests.deploy.local_grid import LocalGrid, Tamper
from tests.deploy.worlds import write_config


class KeyedGrid(LocalGrid):
    """Every node has a key, as the SuperLink tells it."""

    def __init__(self, *args: Any, keys: dict[int, bytes], **options: Any):
        super().__init__(*args, **options)
        self.keys = keys

    def get_nodes(self) -> Iterable[Any]:
        return [SimpleNamespace(node_id=node, public_key=key) for node, key in self.keys.items()]

    def asked_of(self, client: int, since: int = 0) -> int:
        return sum(message.metadata.dst_node_id == 1000 + client for message in self.asked[since:])


class World:
    """Three clients with keys, and what has been told of them."""

    def __init__(
        self, folder: Path, rounds: int = 3, method: str = "fedavg", clients: int = 3, **settings: Any
    ):
        self.config, self.out, self.clients = write_config(folder, method, rounds), folder / "fed", clients
        self.config.write_text(self.config.read_text().replace("clients = 3", f"clients = {clients}"))
        self.ledger, self.folder = Ledger(folder / "ledger.jsonl"), folder
        self.settings = {
            "config": str(self.config),
            "out": str(self.out),
            "deadline": 0.2,
            "join": 1.0,
            "retry": 0.1,
            "ledger": str(self.ledger.path),
        }
        self.settings |= settings
        self.server = make_server_key(folder)
        self.homes = [
            folder / "homes" / str(client) for client in range(clients + 1)
        ]  # the last is a stranger's
        for client, home in enumerate(self.homes):
            home.mkdir(parents=True)
            ssh = make_node_key(home, "node@host")
            (home / "server.pub").write_text(self.server)
            if client < clients:
                self.ledger.append("enrol", client, key=ssh)
        self.keys = {1000 + i: (home / "key.pub").read_bytes() for i, home in enumerate(self.homes)}

    def run(
        self,
        tamper: Tamper | None = None,
        attempt: int = 1,
        nodes: Iterable[int] | None = None,
        **settings: Any,
    ) -> KeyedGrid:
        asked = self.settings | settings
        keys = {1000 + i: self.keys[1000 + i] for i in (range(self.clients) if nodes is None else nodes)}
        self.grid = KeyedGrid(
            self.folder / "nodes", asked, clients=self.clients + 1, attempt=attempt, tamper=tamper, keys=keys
        )
        for home, context in zip(self.homes, self.grid.nodes.values(), strict=True):
            context.node_config |= {"key": str(home / "key"), "server-key": str(home / "server.pub")}
        try:
            serve(self.grid, asked)
        finally:
            self.ledger.refresh()
        return self.grid

    @property
    def who(self) -> Enrolment:
        return Enrolment.of(self.ledger.entries)


def spoil(client: int) -> Tamper:
    """This client's training replies are full of NaN."""

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.dst_node_id == 1000 + client and message.metadata.message_type == "train":
            fields = reply.content["fields"]
            assert isinstance(fields, ArrayRecord)
            fields["update"] = Array(np.full_like(fields["update"].numpy(), np.nan))
        return reply

    return tamper
