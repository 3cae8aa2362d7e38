"""The Flower ClientApp: passes a request to the process that performs it on this node, and sends the reply.

It is called by supernode.py, for every message. Where the node has a resident trainer it passes the request
on; private state is kept on the node's disk. A node is configured by

    client-id   which client of the federation it is; in a federation with keys the server goes by the key
    state-dir   where its private state is kept
    config      its own copy of the experiment's config; default: the path that the run was started with
    home        its own folder, whose node.toml says what data it brings and what may leave it
    trainer     the socket of its resident trainer, if it has one
    key         its private key, and
    server-key  the server's public key; without these two (in a trial) nothing is signed or checked"""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def enrol(message: Message, context: Context) -> Message:
    """Answer which client this node is."""
    from holdfast.deploy.messaging import answer, pack_client

    if "client-id" not in context.node_config:
        raise ValueError("this SuperNode has no client-id; start it with --node-config 'client-id=...'")
    return answer(pack_client(int(context.node_config["client-id"])), message)


@app.train()
@app.evaluate()
def work(message: Message, context: Context) -> Message:
    """Perform one task of the method, or measure. Where there are keys, only requests that the server has
    signed are performed, and the reply is signed."""
    from holdfast.deploy.envelope import NodeSigner, Subject
    from holdfast.deploy.messaging import answer, config_record
    from holdfast.deploy.trainer import ask

    signer = NodeSigner.of(context.node_config)
    if signer is not None:
        signer.check(message.content)
    settings, attempt = (dict(context.node_config), dict(context.run_config)), str(context.run_id)
    content = ask(str(context.node_config.get("trainer", "")), message.content, *settings, attempt)
    if content is None:  # no trainer listens: the work is done here
        from holdfast.deploy.node_worker import NodeWorker

        content = NodeWorker().perform(message.content, *settings, attempt)
    reply = answer(content, message)
    if signer is not None:
        header = config_record(message.content, "header")
        about = {name: header[name] for name in ("run", "round", "step", "task")}
        signer.sign(reply.content, Subject(**about, client=signer.client))  # type: ignore[arg-type]
    return reply
