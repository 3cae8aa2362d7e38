"""Checks a node before round 1, from its own folder alone: key, experiment, device, data and schema,
privacy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast.deploy.check import Check
from holdfast.deploy.enrolment import fingerprint_of
from holdfast.deploy.keys import public_of
from holdfast.deploy.node import declared_in, expected, federated, own_data
from holdfast.deploy.node_worker import NodeHome, guard_of
from holdfast.deploy.privacy import Account
from holdfast.deploy.project import open_node
from holdfast.deploy.server_keys import successor
from holdfast.deploy.server_memory import ServerMemory
from holdfast.deploy.signed_head import read_signed_head
from holdfast.experiment.loop import Experiment
from holdfast.privacy.settings import PrivacySettings


def examine_node(home: Path) -> Iterator[Check]:
    """Yield the checks; one that needs another that failed is left out."""
    try:
        settings = open_node(home)
        yield _key(home, settings.client)
        yield _server(home, settings.state)
        own = NodeHome(home, settings)
        own.load_plugins()
        config = federated(home / settings.experiment)
        clients = expected(config)
        said = (
            f"{config.parts().method.name}, client {settings.client} of {clients}, {config.train.rounds}"
            " rounds"
        )
        yield Check("experiment", settings.client < clients, said)
        experiment = Experiment(config, home / settings.state)
        yield Check("device", True, str(own.device))
        yield _data(own, experiment)
        if (privacy := settings.privacy or experiment.config.privacy) is not None:
            yield _privacy(own, privacy, experiment)
    except (HoldfastError, OSError, ValueError) as error:
        yield Check("node", False, " ".join(str(error).split()))


def examine_head(file: Path, home: Path) -> Iterator[Check]:
    """Compare a published ledger head with what this node knows of its server: the key, and the head that it
    was shown itself."""
    try:
        settings, head = open_node(home), read_signed_head(file)
        if head is None:
            yield Check("head", False, f"there is no file {file}")
            return
        known = (home / "server.pub").read_text(errors="replace")
        good = head.is_signed_by(successor(known, head.keys))
        said = f"{head.entries} entries, signed {head.at} with the key of this node's server"
        yield Check("signature", good, said if good else f"{file}: not signed by this node's server")
        kept = ServerMemory(home / settings.state).kept()
        if kept is None:
            yield Check("seen here", True, "this node has not been shown a ledger yet")
        elif kept.entries == head.entries:
            said = "the same" if kept.head == head.head else "another: the server shows different ledgers"
            yield Check("seen here", kept.head == head.head, f"after {kept.entries} entries it was {said}")
        else:
            said = f"this node was shown {kept.entries} entries; `verify --head` on the server compares them"
            yield Check("seen here", True, said)
    except (HoldfastError, OSError, ValueError) as error:
        yield Check("head", False, " ".join(str(error).split()))


def _server(home: Path, state: str) -> Check:
    memory = ServerMemory(home / state)
    if refused := memory.refused():
        return Check("server", False, refused)
    kept = memory.kept()
    return Check("server", True, "not seen yet" if kept is None else f"has shown {kept.entries} entries")


def _key(home: Path, client: int) -> Check:
    """Check the key, which was made here or came with the folder."""
    remedy = {
        "key": (
            f"`holdfast federation key {home} --client {client}` makes it here, and the server enrols its"
            " public half"
        ),
        "key.pub": f"`holdfast federation key {home} --client {client}` writes it again",
        "ca.pem": f"`holdfast federation enrol` writes it on the server: copy nodes/{client} from there",
        "server.pub": (
            f"copy it from the server: nodes/{client}/server.pub, the public half of the key that signs its"
            " orders"
        ),
    }
    if missing := [name for name in remedy if not (home / name).exists()]:
        return Check("key", False, f"there is no {missing[0]}; {remedy[missing[0]]}")
    if fingerprint_of(public_of(home / "key")) != fingerprint_of(
        (home / "key.pub").read_text(errors="replace")
    ):
        return Check("key", False, "key.pub is not the public half of key: one of them is outdated")
    fingerprint_of((home / "server.pub").read_text(errors="replace"))
    shut = not (home / "key").stat().st_mode & 0o077
    return Check(
        "key", shut, "readable by its owner only" if shut else "key can be read by others: chmod 600"
    )


def _data(own: NodeHome, experiment: Experiment) -> Check:
    """Check shape, type, labels and their names, finite numbers and sample counts against the declaration."""
    client = own.settings.client
    try:
        federation = own_data(experiment, client, own.bring if own.brings else None)
    except (HoldfastError, OSError) as error:
        return Check("data", False, " ".join(str(error).split()))
    parts = {name: int(getattr(federation, name).counts[client]) for name in ("train", "validation", "test")}
    held = federation.train.by_class(federation.samples.classes)[client]
    labels = federation.samples.class_names or tuple(map(str, range(len(held))))
    few = ", ".join(f"{label} {int(n)}" for label, n in zip(labels, held, strict=True) if n)
    where = "its own" if declared_in(experiment.config) is not None else "assigned"
    said = (
        f"{where}: "
        + ", ".join(f"{n} {name}" for name, n in parts.items())
        + f", of shape {list(federation.samples.sample_shape)}"
    )
    return Check("data", parts["train"] > 0, f"{said}; for training {few[:200]}")


def _privacy(own: NodeHome, privacy: PrivacySettings, experiment: Experiment) -> Check:
    """Check privacy, also whether the method sends what noise does not protect: the node would refuse
    that."""
    state, rule = own.home / own.settings.state, experiment.rule
    try:
        guard = guard_of(privacy, state, experiment.config)
        assert guard is not None
        for task in sorted(rule.tasks):
            guard.check(rule.schema(task, experiment.run_context.wire()), task)
        spent = Account(state).spent(privacy.delta)
    except HoldfastError as error:
        return Check("privacy", False, str(error))
    said = (
        f"clip {privacy.clip:g}, noise {privacy.noise:g}; {spent['participations']:.0f} participations so"
        " far, epsilon"
    )
    return Check(
        "privacy", privacy.noise > 0, f"{said} {spent['epsilon/client']:.4g} at delta {privacy.delta:g}"
    )
