"""The committee of C-PFL (Pan, Guo, Li: C-PFL: A committee-based personalized federated learning framework,
JNCA): some clients test every submitted model on their own samples, and only models that are accurate enough
pass. It can be attached to any method.

Equations are the paper's: (1) the score of a model is the average of the members' accuracies, (4) it passes
at a threshold or above, (7) to (11) contributions add up and the clients with the largest sums are the next
committee, Algorithm 3 moves the threshold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from holdfast.core.recorded_table import RecordedTable
from holdfast.core.registry import register, setting
from holdfast.core.types import SCORE, Exchange, State, Steps
from holdfast.detectors.base import Detector, Judgement
from holdfast.detectors.computations import Sound

PAPER = "Pan, Guo and Li, C-PFL: A committee-based personalized federated learning framework, JNCA"
_ROUNDING = 1e-9  # the mean of equal accuracies may be a hair above each of them


@dataclass(frozen=True)
class Memory:
    """What the server remembers: the threshold, the last members, and a row for each client whose model was
    ever scored."""

    tau: Tensor
    members: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    total: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """Contributions so far."""
    accuracy: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """The last score."""
    count: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """The number of samples it last reported."""
    admitted: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """How often its model passed."""
    strikes: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Rejections in a row; 0: it passed the last time."""

    def with_rows(self, ids: Tensor) -> Memory:
        """Rows for these clients too; those of new ones are zero."""
        everyone = torch.cat([self.ids, ids]).unique()
        at = torch.searchsorted(everyone, self.ids)
        rows = {name: getattr(self, name) for name in ("total", "accuracy", "count", "admitted", "strikes")}
        grown = {
            name: value.new_zeros(len(everyone)).index_copy(0, at, value) for name, value in rows.items()
        }
        return replace(self, ids=everyone, **grown)

    def rows(self, ids: Tensor) -> Tensor:
        """Where these clients' rows are."""
        return torch.searchsorted(self.ids, ids)


@dataclass(frozen=True)
class Ballot:
    """One round's scores: `votes` [members, models] with NaN where there is none, the score of each model,
    and whether it counts: enough members voted, or the model is not finite and needs no votes."""

    votes: Tensor
    accuracy: Tensor
    heard: Tensor


_shown = partial(RecordedTable, section="committee")


@register("detector", "committee", paper=PAPER)
class Committee(Detector):
    """Clients test each other's models on their own validation samples; models below a rising accuracy are
    rejected for the round.

    The members' work is a request of its own: every member is sent every model it is to score, and that
    traffic is counted. A member does not score its own model. A federation of one or two clients has no
    committee, and everything passes."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "suspicious": "models that a committee of clients finds less accurate than a rising bound",
        "scores": "`error`: 1 - accuracy",
        "keeps, asks": "members test every model; a few numbers for each client",
        "settings": "see [committee](committee.md)",
        "from": "Pan et al. (C-PFL)",
    }
    tables = {
        "accuracy": _shown(
            "the committee's score of each client's model",
            rows="ids",
            share=True,
            bound="threshold",
            given_by="members",
        ),
        "admitted": _shown(
            "1 where the committee accepted a client's model", kind="flags", rows="ids", share=True
        ),
        "votes": _shown(
            "what each member (client) scored each model (other)",
            kind="votes",
            rows="members",
            columns="ids",
            share=True,
        ),
        "total": _shown("contribution of each client so far, by which members are elected", rows="clients"),
        "members": _shown("the members of the committee", kind="members"),
        "threshold": _shown("the score that a model had to reach", kind="number", share=True),
        "next_threshold": _shown(
            "the score that a model must reach in the next round", kind="number", share=True
        ),
        "clients": _shown("clients that have a contribution", kind="ids"),
        "error": _shown("", share=True),
    }
    size: int = setting(
        0, "members; 0: a tenth of the cohort, at least 3; always at most the cohort less 2", ge=0
    )
    vote: Literal["mean", "median"] = setting(
        "mean", "a model's score of its votes; the median withstands lying members (Eq. 1: mean)"
    )
    sample: int = setting(0, "number of members that score each model, drawn anew for each; 0: all", ge=0)
    quorum: float = setting(
        1.0, "fewest votes for a model: a number (>= 1) or a share (< 1) of those asked", gt=0
    )
    unheard: Literal["reject", "admit"] = setting(
        "reject", "what happens to a model with fewer votes than that"
    )
    tau: float = setting(0.0, "threshold of the first round", ge=0, le=1)
    rule: Literal["monotone", "per-round", "ema", "prediction-interval"] = setting(
        "monotone",
        "next threshold: never lower (the paper), this round's bound, their moving average, or the bound of a"
        " single score",
    )
    scores: Literal["all", "admitted", "members"] = setting(
        "all",
        "what moves the threshold: the scores of all models, of those that passed (of all, where none"
        " did), or each"
        " member's mean accuracy",
    )
    significance: float = setting(
        0.05, "significance of the one-sided lower bound: a smaller one gives a lower threshold", gt=0, lt=0.5
    )
    ema: float = setting(0.5, "rule ema: weight of the old threshold", ge=0, lt=1)
    on_empty: Literal["keep-global", "accept-best-fraction", "decay-tau"] = setting(
        "keep-global",
        "when every model is below the threshold: use none, the best of them, or none and lower the"
        " threshold",
    )
    best_fraction: float = setting(
        0.5, "accept-best-fraction: share of the models that pass, at least one", gt=0, le=1
    )
    decay: float = setting(0.9, "decay-tau: factor on the threshold", ge=0, lt=1)
    ban_after: int = setting(0, "ban a client for good after so many rejections in a row; 0: never", ge=0)
    a: float = setting(0.5, "weight of accuracy against data size in a contribution (Eq. 7)", ge=0, le=1)
    share: Literal["raw", "min-max"] = setting(
        "raw", "data size in it: the share of all samples (Eq. 11), or spread over 0 to 1"
    )
    eligible: Literal["admitted", "any"] = setting(
        "admitted", "clients that are elected first: those with a model that passed at least once, or any"
    )
    credit: bool = setting(
        False,
        "members earn a contribution by their last score; else they earn none, which makes them rotate",
    )

    # ---- members

    def memory(self, state: State) -> Memory:
        return Memory(**state) if state else Memory(torch.tensor([self.tau], dtype=torch.float64))

    def seats(self, clients: int) -> int:
        """The number of members; at least two other clients must be left to be judged."""
        return max(0, min(self.size or max(3, math.ceil(clients / 10 - 1e-9)), clients - 2))

    def elect(self, state: State, ctx: Any) -> Tensor:
        """This round's members, sorted: the available clients with the largest contributions (Eq. 8, 9), ties
        by id; drawn by the key where no client has any yet. The same whenever it is asked in a round, so a
        method may know before it trains."""
        memory, there = self.memory(state), ctx.available
        if not len(memory.ids):
            order = torch.argsort(ctx.key.fold("committee").fold(there).bits, stable=True)
        else:
            memory = memory.with_rows(there)
            rows = memory.rows(there)
            order = torch.argsort(memory.total[rows], descending=True, stable=True)
            if self.eligible == "admitted":  # the others only where these are too few
                order = order[torch.argsort((memory.admitted[rows] == 0)[order].long(), stable=True)]
        return there[order[: self.seats(len(ctx.cohort))]].sort().values

    # ---- a round

    def judge(self, state: State, ctx: Any, models: Tensor, ids: Tensor) -> Steps[Judgement]:
        memory, members = self.memory(state), self.elect(state, ctx)
        memory = replace(memory, members=members)
        sound = yield Sound(models)
        asked = self._asked(members, ids, sound, ctx)
        votes = yield from _votes(members, asked, torch.cat([models, ctx.buffers], dim=1))
        ballot = self._count(votes, asked, sound)
        passed = self._passed(ballot, float(memory.tau), sound) if len(members) else sound
        counts = torch.ones(len(ids)) if ctx.counts is None else ctx.counts
        after = self._after(memory, ballot, passed, ids, counts.double())
        rejected = {
            int(ids[i]): self._reason(ballot, i, float(memory.tau), bool(sound[i]))
            for i in (~passed).nonzero().flatten()
        }
        strikes = dict(zip(after.ids.tolist(), after.strikes.tolist(), strict=True))
        banned = {
            c: f"{strikes[c]} rejections in a row"
            for c in rejected
            if 0 < self.ban_after <= strikes.get(c, 0)
        }
        tables = {
            "members": members,
            "votes": votes,
            "accuracy": ballot.accuracy,
            "admitted": passed,
            "threshold": memory.tau,
            "next_threshold": after.tau,
            "clients": after.ids,
            "total": after.total,
        }
        rejected = {client: reason for client, reason in rejected.items() if client not in banned}
        return Judgement(vars(after).copy(), banned, {"error": 1 - ballot.accuracy}, rejected, tables)

    def _asked(self, members: Tensor, ids: Tensor, sound: Tensor, ctx: Any) -> Tensor:
        """bool [members, models]: which member scores which model. No member scores its own; of the others
        all do, or some drawn for each model (partial consensus)."""
        may = (members[:, None] != ids) & sound
        if not self.sample or self.sample >= len(members):
            return may
        luck = ctx.key.fold("sample").fold(members[:, None]).fold(ids).bits
        order = torch.where(may, luck, torch.iinfo(torch.int64).max).argsort(dim=0, stable=True)
        return may & (order.argsort(dim=0) < self.sample)

    def _count(self, votes: Tensor, asked: Tensor, sound: Tensor) -> Ballot:
        """Eq. 1 over the members that answered. A model that is not finite has accuracy 0."""
        heard, wanted = (~votes.isnan()).sum(0), asked.sum(0)
        least = (
            torch.ceil(self.quorum * wanted - 1e-9)
            if self.quorum < 1
            else wanted.clamp(max=math.ceil(self.quorum))
        )
        accuracy = votes.nanmean(0) if self.vote == "mean" else _median(votes)
        return Ballot(votes, torch.where(sound, accuracy, 0.0), (heard >= least.clamp(min=1)) | ~sound)

    def _passed(self, ballot: Ballot, tau: float, sound: Tensor) -> Tensor:
        """Eq. 4, and what happens where no model passes it."""
        decided = ballot.heard & sound
        passed = decided & (ballot.accuracy >= tau - _ROUNDING)
        if self.on_empty == "accept-best-fraction" and bool(decided.any()) and not bool(passed.any()):
            some = math.ceil(self.best_fraction * int(decided.sum()) - 1e-9)
            order = torch.argsort(torch.where(decided, ballot.accuracy, -1.0), descending=True, stable=True)
            passed[order[:some]] = True
        return passed | ~ballot.heard if self.unheard == "admit" else passed

    def _after(self, memory: Memory, ballot: Ballot, passed: Tensor, ids: Tensor, counts: Tensor) -> Memory:
        """The memory after this round: contributions, strikes and the threshold."""
        known = ballot.heard
        tau = self.next_tau(
            float(memory.tau),
            self._values(ballot, passed),
            empty=bool(known.any()) and not bool(passed.any()),
        )
        memory = memory.with_rows(ids[known])
        rows = memory.rows(ids[known])
        put = {
            "accuracy": ballot.accuracy[known],
            "count": counts[known],
            "admitted": memory.admitted[rows] + passed[known].long(),
            "strikes": torch.where(passed[known], 0, memory.strikes[rows] + 1),
        }
        memory = replace(
            memory,
            tau=torch.tensor([tau], dtype=torch.float64),
            **{name: getattr(memory, name).index_copy(0, rows, value) for name, value in put.items()},
        )
        earners = ids[known]
        if self.credit:
            sat = memory.members[
                torch.isin(memory.members, memory.ids) & ~torch.isin(memory.members, earners)
            ]
            earners = torch.cat([earners, sat])
        rows = memory.rows(earners)
        return replace(
            memory,
            total=memory.total.index_add(
                0, rows, self.contributions(memory.accuracy[rows], memory.count[rows])
            ),
        )

    def _values(self, ballot: Ballot, passed: Tensor) -> Tensor:
        """The "list of accuracy values" that Algorithm 3 takes. The paper does not say which: admitted scores
        are cut off at the threshold, so with them it climbs by that alone."""
        if self.scores == "members":
            means = ballot.votes[:, ballot.heard].nanmean(1)
            return means[~means.isnan()]
        used = ballot.heard & passed if self.scores == "admitted" else ballot.heard
        return ballot.accuracy[
            used if bool(used.any()) else ballot.heard
        ]  # or a threshold that no model reaches would never come down

    def contributions(self, accuracy: Tensor, count: Tensor) -> Tensor:
        """Eq. 7, 10 and 11: a * accuracy, spread over 0 to 1, + (1 - a) * share of the samples."""
        size = count / count.sum().clamp(min=1) if self.share == "raw" else _spread(count)
        return self.a * _spread(accuracy) + (1 - self.a) * size

    def next_tau(self, tau: float, scores: Tensor, empty: bool = False) -> float:
        """Algorithm 3: the lower confidence bound of the mean of these. A single one has no spread and moves
        nothing."""
        if empty and self.on_empty == "decay-tau":
            tau *= self.decay
        k = len(scores)
        if k < 2:
            return tau
        from scipy.special import stdtrit  # only a server needs it; it takes ten megabytes

        width = float(stdtrit(k - 1, 1 - self.significance)) * float(scores.std())  # Student's t
        single = self.rule == "prediction-interval"  # where the next score may lie, not where the mean does
        bound = float(scores.mean()) - width * math.sqrt(1 + 1 / k if single else 1 / k)
        bound = min(max(bound, 0.0), 1.0)
        if self.rule == "monotone":
            return max(tau, bound)
        return self.ema * tau + (1 - self.ema) * bound if self.rule == "ema" else bound

    def _reason(self, ballot: Ballot, i: Tensor, tau: float, sound: bool) -> str:
        if not sound:
            return "model is not finite"
        if not bool(ballot.heard[i]):
            return f"{int((~ballot.votes[:, i].isnan()).sum())} votes are too few"
        return f"accuracy {float(ballot.accuracy[i]):.4g} is below {tau:.4g}"


def _votes(members: Tensor, asked: Tensor, bank: Tensor) -> Steps[Tensor]:
    """[members, models]: the accuracies that came back; NaN where a member was not asked, did not answer, or
    had no samples to test it on."""
    votes = torch.full(asked.shape, torch.nan, dtype=torch.float64)
    busy = asked.any(1)
    if bool(busy.any()):
        pick = torch.where(asked, torch.arange(asked.shape[1]), -1)
        up = yield Exchange(SCORE, members[busy], bank, pick[busy])
        found = up["score"].double()
        votes[torch.searchsorted(members, up.ids)] = torch.where(found < 0, torch.nan, found)
        votes[~asked] = torch.nan
    return votes


def _median(votes: Tensor) -> Tensor:
    """Over the members; of an even number the mean of the middle two."""
    return votes.nanquantile(0.5, dim=0) if len(votes) else votes.new_full((votes.shape[1],), torch.nan)


def _spread(values: Tensor) -> Tensor:
    """Eq. 10: over 0 to 1; where all are alike, all are best."""
    if not len(values):
        return values
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if bool(high > low) else torch.ones_like(values)
