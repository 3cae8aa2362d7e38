"""The optimiser's state of clients that keep it from round to round (`optimizer.persist`): a part of their
private rows, one state for each training of a method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from holdfast.core.errors import RunError
from holdfast.core.types import ROOT, State
from holdfast.local.stack import COUNT, Recipe
from holdfast.models.network import Network

_PREFIX = "optimizer/"


def apart(stored: Mapping[str, Tensor]) -> tuple[State, State]:
    """Return private rows in two: what the method keeps, and what its optimisers keep."""
    own = {name: value for name, value in stored.items() if not name.startswith(_PREFIX)}
    return own, {name: value for name, value in stored.items() if name.startswith(_PREFIX)}


@dataclass
class OptimizerMemory:
    """The kept states of some clients during one task. A state is named by the task and the purpose of its
    training (`train/fit`), so two trainings of a method never share one."""

    task: str
    trainings: Mapping[str, int]
    """How many models each training has for a client; 0: it always starts afresh."""
    rows: State = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        task: str,
        trainings: Mapping[str, int],
        network: Network,
        recipe: Recipe,
        ids: Tensor,
        known: Tensor,
        stored: State,
        device: torch.device,
    ) -> OptimizerMemory | None:
        """Return the states of these clients: those in `stored` for the known ones, zeros for the others and
        for the server's own training. None where the experiment keeps none."""
        if not recipe.optimizer.persist:
            return None
        momentum = bool((torch.as_tensor(recipe.momentum).as_subclass(Tensor) != 0).any())
        names, rule, size = recipe.optimizer.keeps(momentum), recipe.optimizer, network.layout.parameters
        rows: State = {}
        for training, models in trainings.items():
            shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
                name: ((models, size), network.dtype) for name in names
            }
            if rule.counts:
                shapes[COUNT] = (models,), torch.int64
            for name, (shape, dtype) in shapes.items() if models else ():
                whole = torch.zeros(len(ids), *shape, dtype=dtype, device=device)
                kept = stored.get(f"{_PREFIX}{training}/{name}")
                if kept is not None:
                    whole[known.to(device)] = kept
                    whole[(ids == ROOT).to(device)] = 0
                rows[f"{_PREFIX}{training}/{name}"] = whole
        return cls(task, trainings, rows)

    def before(self, purpose: str, models: int, clients: int) -> State | None:
        """Return the state to start a training from, one row per model; None where it always starts
        afresh."""
        training = f"{self.task}/{purpose}"
        if training not in self.trainings:
            raise RunError(
                f"optimizer.persist: the method does not declare its training '{training}'; add it to"
                " `trainings` of its client half, with its number of models per client (0: it always"
                " starts afresh)"
            )
        each = self.trainings[training]
        if not each:
            return None
        if models != each * clients:
            raise RunError(
                f"optimizer.persist: the method declares {each} models per client for '{training}', but"
                f" trains {models} for {clients} clients"
            )
        start = f"{_PREFIX}{training}/"
        # rows of a training are the first model of all clients, then the second of all clients
        return {
            name.removeprefix(start): torch.cat(value.unbind(1))
            for name, value in self.rows.items()
            if name.startswith(start)
        }

    def after(self, purpose: str, state: Mapping[str, Tensor]) -> None:
        """Remember the state that a training ended with."""
        for name, value in state.items():
            place = f"{_PREFIX}{self.task}/{purpose}/{name}"
            self.rows[place] = torch.stack(value.split(len(self.rows[place])), 1)
