"""The base class of server optimisers: from the aggregate of a round to the step of the model."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from holdfast.core.registry import Part, setting
from holdfast.core.types import State


class Step(NamedTuple):
    """What is added to the model's parameters, and what the optimiser remembers for the next round."""

    move: Tensor
    state: State


class ServerOptimizer(Part):
    """Turns the aggregate into a step. The aggregate (after detectors, wrappers and the aggregator) is what
    the clients changed, w_k - w, so it points downhill: it is the negative pseudo-gradient, and the step is
    added.

        class Halved(ServerOptimizer):
            def step(self, aggregate, state):
                return Step(self.lr * 0.5 * aggregate, {})

    The state holds tensors of the aggregate's size. It is empty before the first step, and is saved with the
    run. Parameters only: buffers, such as BatchNorm's statistics, are averaged as without an optimiser. A
    round in which no update was used is no step: model and state stay as they were."""

    lr: float = setting(1.0, "eta: learning rate of the server", gt=0)

    def step(self, aggregate: Tensor, state: State) -> Step:
        raise TypeError(f"{type(self).__name__} does not define a step")
