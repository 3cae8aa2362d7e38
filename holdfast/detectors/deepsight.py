"""DeepSight's choice as a detector (Rieger et al., NDSS 2022, sections IV and V): clients in clusters that
look poisoned are suspicious, and any method and aggregator go on with the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from holdfast.aggregators.inspection import PAPER, Inspection
from holdfast.aggregators.normality import Models
from holdfast.core.registry import register
from holdfast.core.types import State
from holdfast.detectors.selecting import Choice, Selecting


@register("detector", "deepsight", paper=PAPER)
class DeepSight(Inspection, Selecting):
    """Rejects clusters of clients whose updates of the output layer are about few classes.

    What is looked at, and what it costs, is as in the aggregator `deepsight`, whose clipping is left to a
    wrapper. Recorded are the number of classes that the update is about (threshold exceedings, with its sign
    reversed) and the share of the client's cluster that looks poisoned."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "suspicious": "clusters of clients whose last layers look poisoned",
        "scores": "`homogeneity`: minus the classes that an update is about; `poisoned`: the cluster's share",
        "keeps, asks": "clients x `samples` x `seeds` forward passes of the server",
        "settings": "`samples`, `seeds`, `tau`",
        "from": "Rieger et al. 2022",
    }

    def choose(self, state: State, ctx: Any, models: Tensor, ids: Tensor) -> Choice:
        reference = ctx.reference.to(models)
        seen = Models(models, ids, reference, ctx.wire.layout(ctx.layout), to_change=-reference)
        found = self.inspect(seen, getattr(ctx, "probe", None), ctx.key, "detector 'deepsight'")
        return Choice(
            ~found.accepted,
            lambda row: (
                f"{found.poisoned[row]:.0%} of its cluster look poisoned; its update is about"
                f" {found.exceedings[row]} classes"
            ),
            {"homogeneity": -found.exceedings.double(), "poisoned": found.poisoned},
        )
