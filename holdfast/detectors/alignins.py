"""AlignIns, direction alignment inspection: clients whose updates point another way against the global model,
or whose largest entries disagree with the majority of signs to another extent than those of the others, are
suspicious (Xu et al., CVPR 2025, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast.aggregators.geometry import blocks
from holdfast.core.registry import register, setting
from holdfast.core.types import State
from holdfast.detectors.selecting import Choice, Selecting

PAPER = (
    "Xu et al., Detecting Backdoor Attacks in Federated Learning via Direction Alignment Inspection,"
    " CVPR 2025"
)


@register("detector", "alignins", paper=PAPER)
class AlignIns(Selecting):
    """Rejects clients with an unusual temporal direction alignment (TDA) or masked principal sign alignment
    (MPSA).

    TDA is the cosine of the update and the global model; MPSA the share of the update's largest entries
    (`top` of all) whose sign is that of the majority of clients. A value is unusual when it is `tda` or
    `mpsa` standard deviations from the median, or more (MZ score); with the paper's 1.0 honest clients are
    rejected in every round, too. Of equally large entries at the edge all count. The clipping to the median
    length is left to the wrapper `clip`. With fewer than three clients no client is rejected. Recorded are
    both MZ scores."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "suspicious": "unusual cosines with the global model, or agreement with the majority of signs",
        "scores": "`tda`, `mpsa`: the MZ scores",
        "keeps, asks": "",
        "settings": "`tda`, `mpsa`: the largest score that passes; `top`",
        "from": "Xu et al. 2025",
    }
    top: float = setting(0.3, "share of an update's entries that are its largest ones", gt=0, le=1)
    tda: float = setting(
        1.0, "MZ score of the temporal direction alignment from which on it is unusual", gt=0
    )
    mpsa: float = setting(1.0, "MZ score of the sign alignment from which on it is unusual", gt=0)

    def choose(self, state: State, ctx: Any, models: Tensor, ids: Tensor) -> Choice:
        reference, n = ctx.reference.to(models), len(ids)
        if n < 3:
            unknown = {name: torch.full((n,), torch.nan) for name in ("tda", "mpsa")}
            return Choice(torch.zeros(n, dtype=torch.bool), str, unknown, telling=False)
        majority, found = majority_of_signs(models, reference), []
        for model in models:
            update = model - reference
            found.append(torch.stack([_cosine(update, reference), self.alignment(update, majority)]))
        tda, mpsa = torch.stack(found).cpu().unbind(dim=1)
        far, odd = mz_scores(tda), mz_scores(mpsa)

        def reason(row: int) -> str:
            if far[row] >= self.tda:
                return f"MZ score {far[row]:.3g} of the direction alignment"
            return f"MZ score {odd[row]:.3g} of the sign alignment"

        return Choice((far >= self.tda) | (odd >= self.mpsa), reason, {"tda": far, "mpsa": odd})

    def alignment(self, update: Tensor, majority: Tensor) -> Tensor:
        """The share of the largest entries of an update [d] that have the majority's sign."""
        size = update.abs()
        k = max(1, int(self.top * len(size) + 1e-9))
        largest = size >= size.kthvalue(len(size) - k + 1).values
        return ((update.sign() == majority) & largest).sum().double() / largest.sum()


def majority_of_signs(models: Tensor, reference: Tensor) -> Tensor:
    """[d]: the sign of the sum of the updates' signs."""
    found = torch.empty_like(reference)
    for columns in blocks(models):
        found[columns] = (models[:, columns] - reference[columns]).sign().sum(dim=0).sign()
    return found


def mz_scores(values: Tensor) -> Tensor:
    """How many standard deviations each value is from the median; 0 where all are alike."""
    deviation, centre = values.std(correction=0), values.quantile(0.5)
    scores = (values - centre).abs() / deviation
    return scores if bool(deviation > 1e-12) else torch.zeros_like(values)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.double(), b.double()
    return ((a @ b) / (a.square().sum().sqrt() * b.square().sum().sqrt())).nan_to_num(nan=0.0)
