"""Counting answers of models: always right answers and losses; where asked for also macro-F1, balanced
accuracy and AUC, on each client's own samples. An answer that is not finite is wrong for all of them: it
names no class, and it gets the worst rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.core.types import UNDEFINED as UNDEFINED
from holdfast.data.client_rows import Padded

Metric = Literal["macro_f1", "balanced_accuracy", "auc"]
METRICS: tuple[str, ...] = get_args(Metric)


@dataclass(frozen=True)
class Score:
    """Per client: right answers, summed loss, how many samples there were, and in `more` the metrics that
    were asked for."""

    correct: Tensor
    loss: Tensor
    total: Tensor
    more: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def joined(parts: Sequence[Score]) -> Score:
        """The scores of several groups of clients as one."""
        if len(parts) == 1:
            return parts[0]
        correct, loss, total = (
            torch.cat([getattr(p, name) for p in parts]) for name in ("correct", "loss", "total")
        )
        return Score(
            correct, loss, total, {name: torch.cat([p.more[name] for p in parts]) for name in parts[0].more}
        )

    def of(self, which: Tensor) -> Score:
        """By index, the same one as often as it is named."""
        which = which.to(self.correct.device)
        return Score(
            self.correct[which],
            self.loss[which],
            self.total[which],
            {name: value[which] for name, value in self.more.items()},
        )


def judge(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Right or wrong, and the loss, per sample. A model that answers with NaN is wrong, whatever argmax makes
    of it."""
    right = (logits.argmax(-1) == labels) & torch.isfinite(logits).all(-1)
    losses = F.cross_entropy(logits.flatten(0, -2).double(), labels.flatten(), reduction="none").view(
        labels.shape
    )
    return right, losses


class AnswerCounts:
    """Counts answers that come portion by portion, in any order. It does not wait for a GPU before the
    end."""

    def __init__(self, data: Padded, classes: int, metrics: Collection[str] = ()):
        n, where = len(data.count), data.rows.device
        self.data, self.real, self.metrics = data, data.mask, metrics
        self.correct, self.loss = (
            torch.zeros(n, dtype=torch.int64, device=where),
            torch.zeros(n, dtype=torch.float64, device=where),
        )
        self.classes = _Classes(data, self.real) if {"macro_f1", "balanced_accuracy"} & set(metrics) else None
        self.ranks = _Ranks(data, self.real, classes) if "auc" in metrics else None

    def add(self, clients: int | slice | Tensor, places: slice | Tensor, logits: Tensor) -> None:
        """Answers to the samples at `data.rows[clients, places]`: of one client, of several side by side
        (with padding), or of any samples, each with its client and its place."""
        labels = self.data.labels[clients, places]
        right, losses = judge(logits, labels)
        if isinstance(clients, Tensor):
            self.correct.index_add_(0, clients, right.long())
            self.loss.index_add_(0, clients, losses)
        else:
            if isinstance(clients, slice):
                real = self.real[clients, places]
                right, losses = right & real, torch.where(real, losses, torch.zeros_like(losses))
            self.correct[clients] += right.sum(-1)
            self.loss[clients] += losses.sum(-1)
        for more in (self.classes, self.ranks):
            if more is not None:
                more.add(clients, places, logits)

    def score(self) -> Score:
        more: dict[str, Tensor] = {}
        if self.classes is not None:
            more |= self.classes.figures()
        if self.ranks is not None:
            more["auc"] = self.ranks.area()
        return Score(
            self.correct.cpu(),
            self.loss.cpu(),
            self.data.count.cpu().clone(),
            {name: more[name].cpu() for name in self.metrics},
        )


class _Classes:
    """How often each class is a label, an answer, and a right answer, for each client: what recall and F1
    need of a confusion matrix."""

    def __init__(self, data: Padded, real: Tensor):
        self.data, self.real = data, real
        self.owner = torch.arange(len(data.count), device=real.device)[:, None].expand_as(real)
        self.counts = torch.zeros(
            3, len(data.count), 1, dtype=torch.int64, device=real.device
        )  # labelled, answered, right

    def add(self, clients: int | slice | Tensor, places: slice | Tensor, logits: Tensor) -> None:
        outputs = logits.shape[-1]
        if self.counts.shape[2] != outputs:  # how many a model has is known from its first answer
            self.counts = self.counts.new_zeros(3, self.counts.shape[1], outputs)
        labels, told, real = self.data.labels[clients, places], logits.argmax(-1), self.real[clients, places]
        answered = real & torch.isfinite(logits).all(-1)
        at = self.owner[clients, places] * outputs
        for kind, (classes, which) in enumerate(
            [(labels, real), (told, answered), (labels, answered & (told == labels))]
        ):
            self.counts[kind].view(-1).index_add_(0, (at + classes).flatten(), which.flatten().long())

    def figures(self) -> dict[str, Tensor]:
        has, told, right = self.counts.double()
        return {
            "macro_f1": _mean(2 * right / (has + told).clamp(min=1), has + told > 0),
            "balanced_accuracy": _mean(right / has.clamp(min=1), has > 0),
        }


class _Ranks:
    """All answers to the clients at hand, because an area under a ROC curve is of all pairs of a client's
    samples."""

    def __init__(self, data: Padded, real: Tensor, classes: int):
        self.data, self.real, self.classes = data, real, classes
        self.scores = torch.zeros(classes, *real.shape, dtype=torch.float64, device=real.device)

    def add(self, clients: int | slice | Tensor, places: slice | Tensor, logits: Tensor) -> None:
        finite, logits = torch.isfinite(logits).all(-1, keepdim=True), logits.double()
        # of two outputs the difference, made finite: the softmax orders samples in the same way, until it is
        # rounded to 1
        scores = (logits - logits.flip(-1)).nan_to_num() if logits.shape[-1] == 2 else logits.softmax(-1)
        scores = scores[..., : self.classes].where(finite, torch.nan)
        self.scores[:, clients, places] = scores.movedim(-1, 0)

    def area(self) -> Tensor:
        """Each class against all others, and the mean over those of which a client has samples of both sides;
        of two classes, both areas are equal."""
        won, pairs = zip(*(self._against_rest(c) for c in range(self.classes)), strict=True)
        ahead, all_pairs = torch.stack(won, 1).double(), torch.stack(pairs, 1)
        return _mean(ahead / (2 * all_pairs).clamp(min=1), all_pairs > 0)

    def _against_rest(self, which: int) -> tuple[Tensor, Tensor]:
        """Per client: twice the number of pairs in which the sample of the class is ahead of one that is not,
        equals counted once; and the number of pairs. Whole numbers, so that the order in which they are added
        does not matter."""
        positive = self.real & (self.data.labels == which)
        scores = self.scores[which]
        worst = torch.where(
            positive, -torch.inf, torch.inf
        )  # for padding too: behind all others, it changes no rank
        scores = scores.where(self.real & ~scores.isnan(), worst)
        ordered = scores.sort(dim=1).values
        below, up_to = torch.searchsorted(ordered, scores), torch.searchsorted(ordered, scores, right=True)
        own = positive.sum(1)
        twice_the_ranks = torch.where(positive, below + up_to + 1, 0).sum(1)
        return twice_the_ranks - own * (own + 1), own * (self.real.sum(1) - own)


def _mean(values: Tensor, defined: Tensor) -> Tensor:
    """Over the second axis, of what is defined."""
    many = defined.sum(1)
    mean = torch.where(defined, values, 0.0).sum(1) / many.clamp(min=1)
    return torch.where(many > 0, mean, UNDEFINED)
