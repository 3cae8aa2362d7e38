"""The clients' optimiser and schedule that a config names, checked against its other settings and its
method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from holdfast.core.errors import ConfigError
from holdfast.core.registry import Part, build, parts
from holdfast.local.optimizers.base import Optimizer
from holdfast.local.optimizers.sgd import Sgd
from holdfast.local.optimizers.torch_class import classes, torch_name, torch_optimizer
from holdfast.local.schedules import Schedule, function_schedule
from holdfast.methods.base import Method


class Numbers(Protocol):
    """What is read of [train]."""

    @property
    def momentum(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def clip_gradient(self) -> float | None: ...


def named_optimizer(given: Any) -> Any:
    """Return an optimiser as a config holds it: a class of torch.optim by its name, anything else as it
    is."""
    if isinstance(given, Mapping):
        name = torch_name(given.get("name"))
        return given if name is None else {**given, "name": name}
    return torch_name(given) or given


def chosen_optimizer(given: Any, train: Numbers, method: Method) -> Optimizer:
    """Return the optimiser, or raise an error for a setting that it, or the method, could not follow."""
    optimizer = _built(given)
    for name, value in (("momentum", train.momentum), ("weight_decay", train.weight_decay)):
        if value and name not in optimizer.uses:
            other = optimizer.instead.get(name)
            own = f", or set {other} in its place" if other in _settings(optimizer) else ""
            raise ConfigError(
                f"train.{name}: optimizer '{optimizer.name}' does not use it; leave it out{own}"
            )
    if isinstance(optimizer, Sgd) and optimizer.nesterov and not train.momentum:
        raise ConfigError("optimizer.nesterov: has no effect without momentum; set train.momentum")
    if optimizer.persist and not optimizer.by_row:
        raise ConfigError(
            f"optimizer.persist: the state of '{optimizer.name}' cannot be kept between rounds; choose sgd,"
            " adam, adamw or rmsprop, or leave it out"
        )
    if optimizer.persist and not optimizer.keeps(train.momentum > 0):
        raise ConfigError(
            f"optimizer.persist: '{optimizer.name}' keeps nothing between steps; set train.momentum, or"
            " leave it out"
        )
    _check_method(method, optimizer, train.clip_gradient)
    return optimizer


def _check_method(method: Method, optimizer: Optimizer, clip: float | None) -> None:
    """Refuse what the method declares that it cannot follow."""
    asked = {
        "optimizer": not isinstance(optimizer, Sgd) or optimizer.nesterov,
        "optimizer.persist": optimizer.persist,
        "train.clip_gradient": clip is not None,
    }
    for name, reason in method.Client.refuses.items():
        if asked[name]:
            raise ConfigError(f"{name}: method '{method.name}' cannot use it, because {reason}; leave it out")
    if optimizer.persist and not any(method.client_half().trainings().values()):
        raise ConfigError(
            f"optimizer.persist: method '{method.name}' keeps no optimiser's state; leave it out"
        )


def chosen_schedule(given: Any) -> Schedule | None:
    if given is None:
        return None
    if callable(given) and not isinstance(given, (Part, type)):
        return function_schedule(given)
    schedule = build("schedule", given)
    if not isinstance(schedule, Schedule):
        raise ConfigError(f"schedule: {type(schedule).__name__} is not a schedule")
    return schedule


def _built(given: Any) -> Optimizer:
    settings = (
        {key: value for key, value in given.items() if key != "name"} if isinstance(given, Mapping) else {}
    )
    name = given.get("name") if isinstance(given, Mapping) else given
    if torch_name(name) is not None or isinstance(name, (type, torch.optim.Optimizer)):
        return torch_optimizer(name, settings)
    if isinstance(name, str) and name not in parts("optimizer"):
        alike = {one.lower(): one for one in classes()}.get(name.lower())
        if name.lower() in parts("optimizer"):
            own = name.lower()
            torchs = f', or "torch:{alike}" for the class of torch.optim' if alike is not None else ""
            raise ConfigError(f"optimizer: unknown optimizer '{name}'; write \"{own}\"{torchs}")
        if alike is not None:
            raise ConfigError(
                f"optimizer: '{name}' is a class of torch.optim; write optimizer.name = \"torch:{alike}\""
            )
    optimizer = build("optimizer", given)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer: {type(optimizer).__name__} is not an optimiser")
    return optimizer


def _settings(optimizer: Optimizer) -> set[str]:
    return {f"optimizer.{name}" for name in type(optimizer).model_fields}
