"""AutoGM: a geometric median that also chooses the weights of the clients (Li, Ngai and Voigt, IEEE TII
2023)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of, separate
from holdfast.aggregators.geometry import diagonal, times, weighted
from holdfast.aggregators.spectrum import from_the_middle
from holdfast.core.columns import Reads
from holdfast.core.registry import register, setting
from holdfast.core.types import State

PAPER = (
    "Li, Ngai and Voigt, Byzantine-Robust Aggregation in Federated Learning Empowered Industrial IoT, IEEE"
    " Transactions on Industrial Informatics 2023"
)
_TINY = 1e-150
_SETTLED = 1e-11


@register("aggregator", "autogm", paper=PAPER)
class AutoGM(Aggregator):
    """The point z and the shares a that minimise sum of a_i |z - x_i| + lambda / 2 |a|^2: clients far from
    the others get no share at all.

    For a given z the shares are a_i = max(0, eta - |z - x_i|) / lambda with the eta for which they add up to
    1, and for given shares z is their weighted geometric median. From the geometric median with equal shares
    on, both are improved in turns: new shares, and one step of Weiszfeld's algorithm. The authors' code
    (Blades) lets Weiszfeld's algorithm end in every turn, has lambda = n with plain distances
    (`unit = "absolute"`), and looks for eta in the order of clients rather than of distances, which need not
    give the minimum. Plain distances depend on the size of updates, so here lambda is counted in median
    distances from the first z. All distances come from the products [n, n], so turns cost nothing beside
    them. The weights returned are those of the last step, as in `rfa`."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": (
            "geometric median whose weights are chosen, too: none for clients far from the others"
        ),
        "weights returned": "those of the last step",
        "variants and options": (
            '`regularisation`: larger for more even weights; `unit = "absolute"`: lambda in plain distances '
            "(the authors' code); `smoothing`, `iterations`"
        ),
        "paper": "Li et al. 2023",
    }
    reads: ClassVar[Reads] = "gram"
    uses_priors: ClassVar[bool] = False
    condition: ClassVar[str] = "n > 2f"
    keeps: ClassVar[frozenset[str]] = frozenset({"shift", "scale", "hull"})
    regularisation: float = setting(1.0, "lambda for each client, so lambda / n", gt=0)
    unit: Literal["median", "absolute"] = setting(
        "median", "unit of lambda: the median distance to the first geometric median, or absolute"
    )
    smoothing: float = setting(1e-4, "smallest distance that is used, in distances between clients", gt=0)
    iterations: int = setting(500, "largest number of steps, for the first point and for both", ge=1)

    def least(self, f: int) -> int:
        return 2 * f + 1

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        weights = self.weigh(from_the_middle(x, ctx.ids)[None])[0].to(x)
        return Reduced(weighted(weights, x), weights, state)

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        if x.shape[1] < self.least(contexts[0].assumed):
            return self.fall_back_together(x, states, contexts)
        weights = self.weigh(from_the_middle(x, ids_of(contexts))).to(x)
        return separate(weighted(weights, x), weights, states)

    def weigh(self, seen: Tensor) -> Tensor:
        """The weights [c, n] of several experiments from products [c, n, n]: on the host, because many small
        steps take longer to start on a GPU than to compute."""
        seen = seen.cpu()
        n, apart = seen.shape[-1], diagonal(seen).clamp(min=0).sqrt()
        usual = apart.quantile(0.5, dim=-1, keepdim=True)
        shortest = (self.smoothing * usual).clamp(min=_TINY)
        point = _shares(1 / torch.maximum(apart, usual).clamp(min=_TINY))
        point = self.settled(seen, point, shortest, lambda apart: torch.full_like(apart, 1 / n))
        unit = torch.ones_like(usual)
        if self.unit == "median":
            unit = _apart(seen, point, shortest).quantile(0.5, dim=-1, keepdim=True)
        strength = self.regularisation * n * unit
        return self.settled(seen, point, shortest, lambda apart: on_the_simplex(-apart / strength))

    def settled(
        self, seen: Tensor, point: Tensor, shortest: Tensor, shares: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Weiszfeld's steps with the shares that belong to the distances, until no weight changes. Each
        experiment stands still once it is done."""
        moving = torch.ones_like(point[..., :1], dtype=torch.bool)
        for _ in range(self.iterations):
            apart = _apart(seen, point, shortest)
            new = torch.where(moving, _shares(shares(apart) / apart), point)
            moving = moving & ((new - point).abs().amax(dim=-1, keepdim=True) > _SETTLED)
            point = new
            if not bool(moving.any()):
                break
        return point


def on_the_simplex(wanted: Tensor) -> Tensor:
    """The nearest numbers that are not negative and add up to 1 (Duchi et al., ICML 2008, Figure 1)."""
    ordered = wanted.sort(dim=-1, descending=True).values
    count = torch.arange(1, wanted.shape[-1] + 1, dtype=wanted.dtype, device=wanted.device)
    level = (ordered.cumsum(dim=-1) - 1) / count
    last = (ordered > level).sum(dim=-1, keepdim=True) - 1
    return _shares((wanted - level.gather(-1, last)).clamp(min=0))


def _apart(seen: Tensor, point: Tensor, shortest: Tensor) -> Tensor:
    """How far each row is from a mixture of all, at least the shortest distance."""
    across = times(seen, point)
    square = diagonal(seen) - 2 * across + (across * point).sum(dim=-1, keepdim=True)
    return torch.maximum(square.clamp(min=0).sqrt(), shortest)


def _shares(weights: Tensor) -> Tensor:
    return weights / weights.sum(dim=-1, keepdim=True)
