"""SignGuard: clients whose updates are too long or too short, or whose signs are distributed in another way
than those of most clients, are suspicious (Xu et al., ICDCS 2022, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from holdfast.aggregators.clusters import by_mean_shift, directions_apart, largest_cluster
from holdfast.aggregators.geometry import diagonal, distances, norms, total
from holdfast.core.columns import Reads, current
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import State
from holdfast.detectors.selecting import Choice, Selecting

PAPER = (
    "Xu et al., Byzantine-robust Federated Learning through Collaborative Malicious Gradient Filtering, ICDCS"
    " 2022"
)


@register("detector", "signguard", paper=PAPER)
class SignGuard(Selecting):
    """Rejects clients whose update is outside `low` to `high` median lengths, and those outside the largest
    cluster of sign statistics.

    The statistics are the shares of positive, zero and negative entries of an update at random coordinates,
    the same for all clients; mean shift clusters them, which leaves out some honest clients in nearly every
    round. `similarity` adds a fourth: the median cosine to the other updates (SignGuard-Sim) or the median
    distance to them (SignGuard-Dist); the paper also takes the similarity to the last aggregate, which a
    detector does not see. `variant = "authors"` takes neighbouring coordinates and divides each statistic by
    its largest value, as the released code does. The clipping to the median length is left to the wrapper
    `clip`. With fewer than three clients no client is rejected. Recorded are the distance of a client's
    statistics to the mean of the cluster, and the ratio of its length to the median, whichever way round is
    larger."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "suspicious": "too long or too short updates; those outside the largest cluster of sign statistics",
        "scores": "`signs`: distance to that cluster; `length`: ratio to the median length",
        "keeps, asks": "",
        "settings": (
            '`low`, `high`, `share`; `similarity = "cosine"`, `"distance"`: SignGuard-Sim, -Dist;'
            ' `variant = "authors"`'
        ),
        "from": "Xu et al. 2022",
    }
    reads: ClassVar[Reads] = "gram"
    variant: Literal["paper", "authors"] = setting(
        "paper", "authors: a run of neighbouring coordinates, and statistics divided by their largest value"
    )
    low: float = setting(0.1, "shortest update that passes, in median lengths", ge=0, lt=1)
    high: float = setting(3.0, "longest update that passes, in median lengths", gt=1)
    share: float = setting(0.1, "share of the coordinates whose signs are counted", gt=0, le=1)
    similarity: Literal["none", "cosine", "distance"] = setting(
        "none", "a further statistic: the median cosine or distance to the other updates"
    )

    def choose(self, state: State, ctx: Any, models: Tensor, ids: Tensor) -> Choice:
        reference, n = ctx.reference.to(models), len(ids)
        if n < 3:
            unknown = {name: torch.full((n,), torch.nan) for name in ("signs", "length")}
            return Choice(torch.zeros(n, dtype=torch.bool), str, unknown, telling=False)
        length = norms(models, reference).cpu()
        ratio = (length / length.quantile(0.5)).nan_to_num(nan=1.0, posinf=torch.inf)
        wrong = (ratio < self.low) | (ratio > self.high)
        features = self.statistics(models, reference, ctx.key.fold("coordinates"))
        members = largest_cluster(by_mean_shift(features, ids), ids)
        away = torch.zeros(n, dtype=torch.float64)
        if bool(members.any()):
            away = (features - features[members].mean(dim=0)).square().sum(dim=1).sqrt()
        else:
            members = ~members

        def reason(row: int) -> str:
            if wrong[row]:
                return f"update of {ratio[row]:.3g} median lengths"
            return f"signs are {away[row]:.3g} from those of the largest cluster"

        scores = {"signs": away, "length": torch.maximum(ratio, 1 / ratio)}
        return Choice(wrong | ~members, reason, scores)

    def statistics(self, models: Tensor, reference: Tensor, key: Key) -> Tensor:
        """[n, 3 or 4] on the host."""
        chosen = self._coordinates(models, key)
        here = chosen.nonzero().flatten()
        rows, centre = models[:, here], reference[here]
        counts = torch.stack(
            [(rows > centre).sum(dim=1), (rows == centre).sum(dim=1), (rows < centre).sum(dim=1)], dim=1
        )
        found = total(counts).cpu().double()
        found = found / found.sum(dim=1, keepdim=True).clamp(min=1)
        if self.variant == "authors":
            found = found / found.amax(dim=0).clamp(min=1e-8)
        if self.similarity == "none":
            return found
        return torch.cat([found, self._likeness(models, reference)[:, None]], dim=1)

    def _coordinates(self, models: Tensor, key: Key) -> Tensor:
        """bool: which of the columns that are here are counted."""
        shared = current()
        d = models.shape[1] if shared is None else shared.total
        if self.variant == "authors":
            length = max(1, int(self.share * d))
            start = int(key.uniform(1, dtype=torch.float64)[0] * (d - length + 1))
            chosen = torch.zeros(d, dtype=torch.bool, device=models.device)
            chosen[start : start + length] = True
        else:
            luck = key.to(models.device).uniform(d)
            chosen = luck < self.share
            chosen[luck.argmin()] = True  # at least one
        return chosen if shared is None else shared.mine(chosen)

    def _likeness(self, models: Tensor, reference: Tensor) -> Tensor:
        """[n]: the median cosine to the others, or the median distance to them in medians of all."""
        if self.similarity == "cosine":
            table = 1 - directions_apart(models, reference).cpu()
        else:
            table = distances(models).cpu().sqrt()
        diagonal(table).fill_(torch.nan)
        found = table.nanquantile(0.5, dim=1)
        if self.similarity == "cosine":
            return found
        middle = found.quantile(0.5)
        return found / (middle if bool(middle > 0) else found.max().clamp(min=1e-30))
