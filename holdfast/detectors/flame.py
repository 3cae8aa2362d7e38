"""FLAME's choice as a detector (Nguyen et al., USENIX Security 2022, section 4.2.1): clients outside the
majority cluster of directions are suspicious, and any method and aggregator go on with the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast.aggregators.majority_cluster import PAPER, MajorityCluster
from holdfast.core.columns import Reads
from holdfast.core.registry import register
from holdfast.core.types import State
from holdfast.detectors.selecting import Choice, Selecting


@register("detector", "flame", paper=PAPER)
class Flame(MajorityCluster, Selecting):
    """Rejects clients whose models point another way than the cluster of more than half of the cohort.

    The cluster is the densest such part, so of a cohort in which all are honest and equally far apart close
    to half is rejected in every round. With fewer than three clients, or without such a cluster, no client is
    rejected. Recorded is the mean cosine distance to the clients of the cluster. FLAME's clipping and noise
    are those of the aggregator `flame`."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "suspicious": "clients outside the majority cluster of directions (HDBSCAN)",
        "scores": "`apart`: mean cosine distance to the cluster",
        "keeps, asks": "",
        "settings": '`of = "update"`: directions of updates, not of models',
        "from": "Nguyen et al. 2022",
    }
    reads: ClassVar[Reads] = "gram"

    def choose(self, state: State, ctx: Any, models: Tensor, ids: Tensor) -> Choice:
        apart = self.apart(models, None, -ctx.reference.to(models)).cpu()
        members = self.admitted(apart, ids) if len(ids) > 2 else torch.zeros(len(ids), dtype=torch.bool)
        if not bool(members.any()):
            nobody = torch.full((len(ids),), torch.nan)
            return Choice(members, str, {"apart": nobody}, telling=False)
        others = members.double() - torch.diag(members.double())
        found = (apart * others).sum(dim=1) / others.sum(dim=1).clamp(min=1)
        return Choice(
            ~members, lambda row: f"cosine distance to the majority is {found[row]:.3g}", {"apart": found}
        )
