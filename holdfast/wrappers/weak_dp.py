"""Weak differential privacy (Sun et al., 2019, section 4): short updates, and a little Gaussian noise on the
model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import State
from holdfast.wrappers.base import Around
from holdfast.wrappers.clip import Clip

PAPER = "Sun et al., Can You Really Backdoor Federated Learning?, 2019"


@register("wrapper", "weak-dp", paper=PAPER)
class WeakDP(Around):
    """The rule on updates shortened to a norm; after the server's step, every parameter of the model gets
    Gaussian noise of standard deviation `noise`.

    Paper (section 4): w + sum of p_k u_k / max(1, |u_k| / M) + N(0, s^2 I), with the noise on the aggregate;
    with the plain step of the server that is the same. There s = 0.025 on EMNIST. So
    little noise gives no privacy worth the name: [privacy] is for that. Noise follows from the run's seed and
    the round; it is added once, wherever the wrapper stands among others, and not where no update was used.
    Buffers get none."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what the rule sees": "updates shortened to `norm`, in median norms or absolute",
        "what comes out": "the rule's aggregate; the model gets Gaussian noise after the step",
        "from": "Sun et al., 2019",
    }
    reads: ClassVar[Reads] = "gram"
    norm: float = setting(1.0, "largest length of an update", gt=0)
    unit: Literal["median", "absolute"] = setting(
        "median", "unit of the norm: the cohort's median norm, or absolute"
    )
    noise: float = setting(
        0.001, "standard deviation of the noise on every parameter of the model (paper: 0.025)", ge=0
    )

    def reduce(
        self, inner: Aggregator, x: Tensor, w: Tensor, state: State, ctx: AggregationContext
    ) -> Reduced:
        return self._clip().reduce(inner, x, w, state, ctx)

    def reduce_together(
        self,
        inner: Aggregator,
        x: Tensor,
        w: Tensor,
        states: Sequence[State],
        contexts: Sequence[AggregationContext],
    ) -> list[Reduced]:
        return self._clip().reduce_together(inner, x, w, states, contexts)

    def after_step(self, model: Tensor, ctx: AggregationContext) -> Tensor:
        return model + gaussian(ctx.key.fold("weak-dp"), model, self.noise)

    def _clip(self) -> Clip:
        return Clip(norm=self.norm, unit=self.unit)


def gaussian(key: Key, like: Tensor, deviation: float) -> Tensor:
    """Noise of this deviation for each entry of a vector. It is drawn on the host, so that it has the same
    bits wherever the server computes."""
    return to_device(deviation * key.normal(len(like), dtype=like.dtype), like.device)
