"""What should be right on a node before round 1, from its own folder alone: key, experiment, data and schema, what may leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from holdfast.config import Config
from holdfast.core.errors import HoldfastError
from holdfast.deploy.inspect import Check
from holdfast.deploy.node import declared_in, expected, federated, own_data
from holdfast.deploy.privacy import Account, PrivacySettings
from holdfast.deploy.project import NodeSettings, open_node
from holdfast.deploy.work import Own
from holdfast.experiment import Experiment


def examine_node(home: Path) -> Iterator[Check]:
    """Each check says one thing; what needs another that failed is left out."""
    try:
        settings = open_node(home)
        yield _key(home)
        config = federated(home / settings.experiment)
        clients = expected(config)
        said = f"{config.parts().method.name}, client {settings.client} of {clients}, {config.train.rounds} rounds"
        yield Check("experiment", settings.client < clients, said)
        yield _data(home, settings, config)
        if settings.privacy is not None:
            yield _privacy(home, settings, settings.privacy, config)
    except (HoldfastError, OSError, ValueError) as error:
        yield Check("node", False, " ".join(str(error).split()))


def _key(home: Path) -> Check:
    missing = [name for name in ("key", "key.pub", "ca.pem") if not (home / name).exists()]
    if missing:
        return Check("key", False, f"there is no {missing[0]}; `holdfast federation enrol` writes it, on the server")
    shut = not (home / "key").stat().st_mode & 0o077
    return Check("key", shut, "readable by its owner only" if shut else "key can be read by others: chmod 600")


def _data(home: Path, settings: NodeSettings, config: Config) -> Check:
    """Shape, type, labels and their names, finite numbers, enough samples: all that was declared."""
    own = Own(home, settings)
    try:
        experiment = Experiment(config, home / settings.state)
        federation = own_data(experiment, settings.client, own.bring if own.brings else None)
    except (HoldfastError, OSError) as error:
        return Check("data", False, " ".join(str(error).split()))
    parts = {name: int(getattr(federation, name).counts[settings.client]) for name in ("train", "validation", "test")}
    held = federation.train.by_class(federation.samples.classes)[settings.client]
    labels = federation.samples.class_names or tuple(map(str, range(len(held))))
    few = ", ".join(f"{label} {int(n)}" for label, n in zip(labels, held, strict=True) if n)
    where = "its own" if declared_in(config) is not None else "dealt"
    said = f"{where}: " + ", ".join(f"{n} {name}" for name, n in parts.items()) + f", of shape {list(federation.samples.sample_shape)}"
    return Check("data", parts["train"] > 0, f"{said}; for training {few[:200]}")


def _privacy(home: Path, settings: NodeSettings, privacy: PrivacySettings, config: Config) -> Check:
    try:
        Own(home, settings).guard(home / settings.state, config)
        spent = Account(home / settings.state).standing(privacy.delta)
    except HoldfastError as error:
        return Check("privacy", False, str(error))
    said = f"clip {privacy.clip:g}, noise {privacy.noise:g}; {spent['participations']:.0f} participations so far, epsilon"
    return Check("privacy", privacy.noise > 0, f"{said} {spent['epsilon/client']:.4g} at delta {privacy.delta:g}")
