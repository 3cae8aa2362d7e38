"""The Flower ClientApp: unpacks a request, lets the node carry it out, packs the reply.

Flower starts a new process for every message, and its own `Context.state` dies with the SuperNode, so the process starts fast (torch is
imported only when there is work) and private state is kept on the node's disk. A node is configured by

    client-id   which client of the federation it is; issue 9 replaces this claim by enrolment keys
    state-dir   where its private state lies
    config      its own copy of the experiment's config; default: the path that the run was started with"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def enrol(message: Message, context: Context) -> Message:
    """Say who this node is."""
    from holdfast.deploy.post import answer, pack_client

    return answer(pack_client(int(_setting(context, "client-id"))), message)


@app.train()
@app.evaluate()
def work(message: Message, context: Context) -> Message:
    """Carry out one task of the method, or measure."""
    from holdfast.deploy.post import answer

    return answer(_perform(message.content, context), message)


def _perform(content: RecordDict, context: Context) -> RecordDict:
    from holdfast.deploy import wire
    from holdfast.deploy.node import Node, federated

    client, header = int(_setting(context, "client-id")), wire.read_header(content)
    folder = Path(str(_setting(context, "state-dir"))) / header.run / str(client)
    config = federated(str(context.node_config.get("config", context.run_config["config"])))
    node = Node(config, client, folder, header.world, header.round, header.threads)
    exchange = wire.read_exchange(content, header, client, node.cell.wire().size, node.cell.network.dtype)
    return wire.pack_fields(node.perform(exchange, header.committed, attempt=str(context.run_id)))


def _setting(context: Context, name: str) -> Any:
    if name not in context.node_config:
        raise ValueError(f"this SuperNode has no {name}; start it with --node-config '{name}=...'")
    return context.node_config[name]
