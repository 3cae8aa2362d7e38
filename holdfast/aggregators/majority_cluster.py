"""The majority of clients that point the same way (FLAME, Nguyen et al., USENIX Security 2022, section
4.2.1): the choice behind the aggregator `flame` and the detector `flame`, and its setting, which both have in
common."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from holdfast.aggregators.clusters import by_density, directions_apart, largest_cluster
from holdfast.core.device import to_device
from holdfast.core.registry import Part, setting

PAPER = "Nguyen et al., FLAME: Taming Backdoors in Federated Learning, USENIX Security 2022"


class MajorityCluster(Part):
    """HDBSCAN over cosine distances, with clusters of more than half of the clients."""

    of: Literal["model", "update"] = setting(
        "model", "what is compared by direction: the clients' models (the paper), or their updates"
    )

    def apart(self, rows: Tensor, to_model: Tensor | None, to_update: Tensor | None) -> Tensor:
        """[..., n, n]: the cosine distances of what is compared. A row plus `to_model` is a client's model,
        plus `to_update` its update; none: nothing is to be added."""
        added = to_model if self.of == "model" else to_update
        return directions_apart(rows, None if added is None else -added)

    def admitted(self, apart: Tensor, ids: Tensor) -> Tensor:
        """bool[..., n] where the distances are: the one cluster of more than half of the clients; nobody,
        where there is none. The host clusters one experiment after the other."""
        if apart.ndim == 2:
            return to_device(_majority(apart.cpu(), ids), apart.device)
        found = [_majority(table, own) for table, own in zip(apart.cpu(), ids, strict=True)]
        return to_device(torch.stack(found), apart.device)


def _majority(apart: Tensor, ids: Tensor) -> Tensor:
    n = len(apart)
    if n == 1:
        return torch.ones(1, dtype=torch.bool)
    return largest_cluster(by_density(apart, ids, n // 2 + 1, single=True), ids)
