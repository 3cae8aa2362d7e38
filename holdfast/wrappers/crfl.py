"""CRFL: clipping and noise on the model in every round, for predictions that are certified against backdoors
(Xie, Chen, Chen, Li: CRFL: Certifiably Robust Federated Learning against Backdoor Attacks, ICML 2021,
Algorithm 1).

After the server's step in round t: w <- w / max(1, |w| / rho_t), then w <- w + N(0, sigma^2 I). The
prediction of a finished run is that of most of the models w_T + N(0, sigma_T^2 I): `holdfast certify` votes,
and computes the radius of Theorem 3 (diagnostics/certificate.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.aggregators.geometry import norms
from holdfast.core.columns import Reads
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import State
from holdfast.wrappers.base import Around, reduce_each
from holdfast.wrappers.weak_dp import gaussian

PAPER = "Xie et al., CRFL: Certifiably Robust Federated Learning against Backdoor Attacks, ICML 2021"


@register("wrapper", "crfl", paper=PAPER)
class CRFL(Around):
    """After the server's step the whole model is shortened to rho_t = min(`largest`, `start` + `growth` t) in
    round t, and every parameter gets Gaussian noise of standard deviation `noise`.

    The rule sees the updates as they are. The defaults are those of the authors' code for logistic regression
    on MNIST (rho_t = 2 + 0.1 t, at most 15; sigma = 0.01): a larger network needs a larger `start`, or most
    of it is cut off. In the paper the last round has no noise, since predictions have their own; here it has,
    because a run can be continued, and `holdfast certify` takes that of the last round off again. The noise
    follows from the run's seed and the round. A round in which no update was used changes nothing. Buffers
    are left alone (the authors' code adds noise to them, too)."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what the rule sees": "the updates",
        "what comes out": (
            "the rule's aggregate; after the step the model is shortened and gets Gaussian noise, for"
            " `holdfast certify`"
        ),
        "from": "Xie et al., ICML 2021",
    }
    reads: ClassVar[Reads] = "sum"
    start: float = setting(2.0, "largest length of the model in round 0", gt=0)
    growth: float = setting(0.1, "by how much that length grows with each round", ge=0)
    largest: float = setting(15.0, "where it stops to grow", gt=0)
    noise: float = setting(0.01, "standard deviation of the noise on every parameter of the model", ge=0)

    def reduce(
        self, inner: Aggregator, x: Tensor, w: Tensor, state: State, ctx: AggregationContext
    ) -> Reduced:
        return inner(x, w, state, ctx)

    def reduce_together(
        self,
        inner: Aggregator,
        x: Tensor,
        w: Tensor,
        states: Sequence[State],
        contexts: Sequence[AggregationContext],
    ) -> list[Reduced]:
        return reduce_each(inner, x, w, states, contexts)

    def bound(self, round: int) -> float:
        """rho_t."""
        return min(self.largest, self.start + self.growth * round)

    def after_step(self, model: Tensor, ctx: AggregationContext) -> Tensor:
        return self.shortened(model, ctx.round) + self.noise_of(model, ctx.key)

    def shortened(self, model: Tensor, round: int) -> Tensor:
        length = float(norms(model[None])[0])
        return model * min(1.0, self.bound(round) / length) if length > 0 else model

    def noise_of(self, model: Tensor, key: Key) -> Tensor:
        """The noise of the round with this key for a model of this size."""
        return gaussian(key.fold("crfl"), model, self.noise)
