"""DeepSight: clusters of clients whose updates look poisoned are left out, the others are shortened to the
median length (Rieger et al., NDSS 2022, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.aggregators.geometry import norms, weighted
from holdfast.aggregators.inspection import PAPER, Inspection, output_layer
from holdfast.aggregators.normality import Models
from holdfast.core.device import to_device
from holdfast.core.flat import Layout
from holdfast.core.registry import register
from holdfast.core.types import State


@register("aggregator", "deepsight", paper=PAPER)
class DeepSight(Inspection, Aggregator):
    """The plain mean of the clients in clusters that do not look poisoned, each shortened to the median
    length of all updates.

    An update looks poisoned where few outputs of the last layer have changed much: at most half as many as in
    the median update (threshold exceedings). Clients are clustered by HDBSCAN three times: by the energies of
    these changes, by the directions of the last layer's biases (of its weights, where it has none), and by
    their answers to random inputs, compared with those of the global model; a last clustering joins them, and
    a cluster stays when less than `tau` of it looks poisoned. A client without a cluster is judged by itself.

    Answers cost clients x `samples` x `seeds` forward passes in each round (the paper's 20,000 x 3), which
    can be many times what training costs: a few hundred inputs are enough for small networks, and `samples =
    0` leaves answers out. Memory is one model and a few inputs at a time, and clients x classes numbers; the
    updates are not copied. Inputs are uniform numbers in [0, 1), of texts uniform words. Where the rule is
    called outside of a run there is no network, and answers are left out. A method in which the output layer
    does not travel is refused. Where no cluster stays, the median is the fallback. The weights returned are
    equal ones on the clients that stay, shortened as their updates are."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": (
            "mean, shortened to the median length, of clusters whose last layers do not look poisoned"
        ),
        "weights returned": "equal, on those that stay, shortened",
        "variants and options": "`samples`, `seeds`: random inputs to the models; `tau`",
        "paper": "Rieger et al. 2022",
    }
    uses_priors: ClassVar[bool] = False
    in_places: ClassVar[bool] = True
    condition: ClassVar[str] = "n > 2f"

    def init(self, layout: Layout) -> State:
        output_layer(layout, "aggregator 'deepsight'")
        return {}

    def least(self, f: int) -> int:
        return 2 * f + 1

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        received = to_device(ctx.received, x.device).to(x.dtype)
        models = Models(x, ctx.ids, received, ctx.layout, to_model=received)
        found = self.inspect(models, ctx.probe, ctx.key, "aggregator 'deepsight'")
        if not bool(found.accepted.any()):
            return self.fall_back(x, state, ctx)
        length = norms(x)
        shorter = (length.quantile(0.5) / length).nan_to_num_(nan=1.0, posinf=1.0).clamp_(max=1)
        accepted = to_device(found.accepted, x.device)
        weights = (accepted * shorter / accepted.sum()).to(x.dtype)
        return Reduced(weighted(weights, x), weights, state)
