"""How normal a client's model is (FedCPA, Han et al., ICCV 2023, section 5): the score behind the aggregator
`fedcpa` and the detector `normality`, and its settings, which both have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from holdfast.aggregators.critical import Correlation, agreement, critical_sets, importance, spans_of
from holdfast.aggregators.geometry import weighted
from holdfast.core.device import to_device
from holdfast.core.flat import Layout
from holdfast.core.registry import Part, setting
from holdfast.core.types import State

PAPER = "Han et al., Towards Attack-Tolerant Federated Learning via Critical Parameter Analysis, ICCV 2023"


@dataclass(frozen=True)
class Models:
    """The models of a round without a copy of them: row i plus `to_model` is client i's model, row i plus
    `to_change` its change against `reference`; none: nothing is to be added. Rows are asked for in the order
    of ids, so that the order of replies does not matter."""

    rows: Tensor
    ids: Tensor
    reference: Tensor
    layout: Layout
    to_model: Tensor | None = None
    to_change: Tensor | None = None

    def mean_change(self, usable: Tensor) -> Tensor:
        shares = (usable / usable.sum()).to(self.rows.dtype)
        every = bool(usable.all())
        mean = weighted(shares, self.rows) if every else weighted(shares[usable], self.rows[usable])
        return mean if self.to_change is None else mean + self.to_change


@dataclass(frozen=True)
class Scores:
    """For each client: whether its numbers are finite, the normality (Eq. 7; not a number where there is
    none), the weight lambda (Eq. 8); whether weights mean anything (if not, all usable clients have 1), and
    what the next round has to remember."""

    usable: Tensor
    normality: Tensor
    weights: Tensor
    telling: bool
    state: State


class Scoring(Part):
    """The settings of the score."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {"authors": {"correlation": "pearson", "literal": True}}
    variant: Literal["paper", "authors"] = setting(
        "paper", "authors: correlation = pearson and literal = true, as in the released code"
    )
    k: float = setting(
        0.01, "share of the parameters in each critical set; never less than one parameter", gt=0, le=0.5
    )
    min_dims: int = setting(2, "ignore tensors with fewer dimensions (biases, norms); 0: use all", ge=0)
    topk: bool = setting(True, "compare the most important parameters")
    bottomk: bool = setting(True, "compare the least important parameters")
    global_: bool = setting(True, "compare with the last change of the global model")
    local: bool = setting(True, "compare clients with each other")
    correlation: Correlation = setting(
        "spearman", "on common parameters: of ranks (the paper), or pearson of importances (its code)"
    )
    undefined: float = setting(
        0.5, "the correlation in [0, 1] where too little is in common to have one; 0 is stricter", ge=0, le=1
    )
    nonzero: bool = setting(
        False, "parameters without any importance belong to no set; false: ties are broken by their index"
    )
    tolerance: float = setting(
        1e-9, "scores no further apart count as equal: then no client is filtered", ge=0
    )
    literal: bool = setting(
        False,
        "the code's first round: changes are against the mean of the clients' models, not the model sent",
    )

    @model_validator(mode="after")
    def _something_is_compared(self) -> Self:
        if not (self.topk or self.bottomk):
            raise ValueError("topk and bottomk are both false, so nothing would be compared; switch one on")
        if not (self.global_ or self.local):
            raise ValueError(
                "global_ and local are both false, so there would be nothing to compare with; switch one on"
            )
        return self

    def has_memory(self) -> bool:
        """Whether the model sent last matters: to compare with its change, or to know the first round from
        others."""
        return self.global_ or self.literal

    def score(self, models: Models, state: State) -> Scores:
        """Normality and weights of the cohort; `state` holds the model sent in the round before."""
        n, rows = len(models.rows), models.rows
        order = models.ids.argsort().tolist()
        usable = (
            torch.maximum(rows.amax(dim=1), -rows.amin(dim=1)).isfinite().cpu()
            if rows.shape[1]
            else torch.ones(n, dtype=torch.bool)
        )
        reference, to_change = to_device(models.reference, rows.device).to(rows.dtype), models.to_change
        before = to_device(state["model"], rows.device) if "model" in state else None
        if before is not None and before.shape != reference.shape:  # another part of the model travels now
            before = None
        if before is None and self.literal and bool(usable.any()):
            mean = models.mean_change(usable.to(rows.device))
            before, reference = reference, reference + mean
            to_change = -mean if to_change is None else to_change - mean
        memory = {"model": reference.clone()} if self.has_memory() else {}
        kept = [i for i in order if usable[i]]
        normality = torch.full((n,), torch.nan, dtype=torch.float64)
        if len(kept) > 2:
            change = None if before is None or not self.global_ else reference - before.to(reference)
            normality[kept] = self._normality(models, kept, reference, to_change, change)
        weights, telling = weights_of(normality, usable, self.tolerance)
        return Scores(usable, normality, weights, telling, memory)

    def _normality(
        self,
        models: Models,
        kept: list[int],
        reference: Tensor,
        to_change: Tensor | None,
        change: Tensor | None,
    ) -> Tensor:
        """Eq. 7: likeness to the last change of the model, where there was one, plus the mean likeness to all
        clients, oneself included."""
        spans, n = spans_of(models.layout, self.min_dims), len(kept)
        size = sum(span.stop - span.start for span in spans)
        room = torch.empty(size, dtype=models.rows.dtype, device=models.rows.device)
        moved = change is not None and any(bool(change[span].any()) for span in spans)

        def importances() -> Iterator[Tensor]:
            for i in kept:
                yield importance(models.rows[i], models.to_model, to_change, spans, room)
            if moved and change is not None:
                yield torch.cat([(change[span] * reference[span]).abs() for span in spans])

        top, bottom = critical_sets(importances(), max(1, int(self.k * size + 1e-9)), self.nonzero)
        alike = torch.zeros(n + moved, n + moved, dtype=torch.float64)
        for used, sets in ((self.topk, top), (self.bottomk, bottom)):
            if used:
                alike += agreement(sets, self.correlation, self.undefined)
        found = torch.zeros(n, dtype=torch.float64)
        if self.local:
            found += alike[:n, :n].mean(dim=1)
        if moved:
            found += alike[:n, n]
        return found


def weights_of(normality: Tensor, usable: Tensor, tolerance: float) -> tuple[Tensor, bool]:
    """Eq. 8: scores scaled to [0, 1] by the cohort's least and greatest, through the logit, clipped; and
    whether they separate any clients: if not, all usable clients have weight 1."""
    scored = normality[~normality.isnan()]
    if not len(scored) or not bool(scored.amax() - scored.amin() > tolerance):
        return usable.double(), False
    scaled = (normality - scored.amin()) / (scored.amax() - scored.amin())
    return (torch.logit(scaled.clamp(0.01, 0.99)) + 0.5).clamp(0, 1).nan_to_num(nan=0.0), True
