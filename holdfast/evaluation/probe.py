"""What models answer to inputs that the server makes up: for server halves and rules that compare models by
their answers. A probe knows the network and what a sample looks like, and leads to nobody's samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from holdfast.core.device import to_device
from holdfast.core.flat import Wire
from holdfast.core.keys import Key
from holdfast.data.hashed_words import HASHES
from holdfast.models.network import Network

_VALUES_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 26}
_INPUTS_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class Probe:
    """Passes made-up inputs through models as they travel. Of a method of which only a part of the model
    travels, the rest is the common start model's, as for a committee."""

    network: Network
    shape: tuple[int, ...]
    """The shape of a sample."""
    words: bool
    """Whether a sample is a text."""
    wire: Wire
    initial: Tensor
    """The whole common start model."""
    buffers: Tensor | None = None
    """[n, b]: the buffers that came with the models of a round."""
    sent: Tensor | None = None
    """[b]: those of the model that was sent."""

    def of_round(self, buffers: Tensor | None, sent: Tensor) -> Probe:
        return replace(self, buffers=buffers, sent=sent)

    def of_mixtures(self) -> Probe:
        """The same for mixtures of the round's models, which have the buffers that were sent."""
        return replace(self, buffers=None)

    def only(self, rows: Tensor) -> Probe:
        """The same for some of the round's models."""
        if self.buffers is None:
            return self
        return replace(self, buffers=self.buffers[to_device(rows, self.buffers.device)])

    @property
    def device(self) -> torch.device:
        """Where the network computes."""
        return next(self.network.module.parameters()).device

    def inputs(self, key: Key, count: int) -> Iterator[Tensor]:
        """So many inputs, a few at a time: numbers are uniform in [0, 1), as in DeepSight's paper; words are
        uniform over the rows of the network's largest table of words."""
        room = _VALUES_AT_ONCE[self.device.type if self.device.type in _VALUES_AT_ONCE else "cpu"]
        most = max(1, min(_INPUTS_AT_ONCE, room // max(1, math.prod(self.shape))))
        for start in range(0, count, most):
            shape = min(most, count - start), *self.shape
            own = key.fold(start).to(self.device)
            if self.words:
                yield 1 + own.hash(*shape).remainder(self._largest_word())
            else:
                yield own.uniform(*shape, dtype=self.network.dtype)

    def _largest_word(self) -> int:
        """Ids of words are 1 to this: a word's hash is mapped to a row of the table, and a token is one."""
        tables = [m.num_embeddings for m in self.network.module.modules() if isinstance(m, nn.Embedding)]
        return max(1, max(tables) - 1) if tables else HASHES

    def log_shares(self, parameters: Tensor, row: int | None, x: Tensor) -> Tensor:
        """[inputs, classes] in float64: the logarithms of the shares that a model gives to the classes. The
        model has these parameters, as they travel, and the buffers of this row; none: those that were
        sent."""
        network, held = self.network, self.sent if row is None or self.buffers is None else self.buffers[row]
        sent = parameters if held is None else torch.cat([parameters, held.to(parameters)])
        model = self.wire.unpack(to_device(sent, self.device), to_device(self.initial, self.device))
        tensors = network.layout.tensors(model.to(network.dtype))
        training = network.module.training
        network.module.eval()
        try:
            with torch.no_grad(), network.drawing(None):
                answers = network.attempt(
                    lambda: functional_call(network.module, tensors, (network.ordered(x),)), stacked=False
                )
        finally:
            network.module.train(training)
        return answers.double().log_softmax(dim=-1)
