"""A slow reference for the client side of a run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from holdfast.core.keys import Key
from holdfast.data.federation import Padded
from holdfast.local.fit import Recipe
from holdfast.results.run import Run
from tests.helpers import slow_fit

ROUNDS, LR, EPOCHS, BATCH = 3, 0.1, 2, 5


class Slowly:
    """The client side of a run, one model after the other."""

    def __init__(self, run: Run):
        self.experiment = run._experiment
        self.network, self.federation, self.w0 = (
            self.experiment.network,
            self.experiment.federation,
            self.experiment.initial,
        )
        self.cohorts = [run.store.arrays(round)["cohort"].tolist() for round in range(1, ROUNDS + 1)]
        self.counts = self.federation.train.counts.double()

    def train(
        self, model: Tensor, client: int, round: int, pull: tuple[Tensor, float] | None = None, step: int = 0
    ) -> Tensor:
        key = Key(0).fold("client", round, step).fold(torch.tensor([client])).fold("fit")
        recipe = Recipe(lr=LR * 0.8 ** (round - 1), epochs=EPOCHS, batch_size=BATCH)

        def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            value = nn.functional.cross_entropy(net(x), y)
            if pull is None:
                return value
            flat = torch.cat([p.flatten() for p in net.parameters()])
            return value + pull[1] / 2 * ((flat - pull[0]) ** 2).sum()

        data: Padded = self.federation.train.take(torch.tensor([client]))
        return slow_fit(self.network, model[None], self.federation.samples, data, key, recipe, loss=loss)[0]

    def mean(self, models: dict[int, Tensor]) -> Tensor:
        total = sum(self.counts[c] for c in models)
        return sum((self.counts[c] / total * m for c, m in models.items()), torch.zeros_like(self.w0))
