"""What a server half is handed in a round. It holds no ground truth, and nothing in it leads to any."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator
from holdfast.core.errors import RunError
from holdfast.core.flat import Layout, Wire
from holdfast.core.keys import Key
from holdfast.core.types import ROOT, Exchange, State, Uplink, Verdict, broadcast, nothing
from holdfast.detectors.base import Detector

_TRUTH = {"malicious", "attackers", "attack", "adversary", "benign", "truth", "ground_truth"}
Steps = Generator[Exchange, Uplink, Any]


@dataclass(frozen=True)
class Merged:
    """The outcome of one reduction: the new model, the aggregator's memory inside the state, and the verdict."""

    model: Tensor
    state: State
    verdict: Verdict


@dataclass(frozen=True)
class Context:
    """One round as the server sees it."""

    round: int
    cohort: Tensor
    available: Tensor
    key: Key
    wire: Wire
    layout: Layout
    initial: Tensor
    """The common start model, as it travels."""
    aggregator: Aggregator
    detectors: tuple[Detector, ...] = ()
    server_lr: float = 1.0
    weighting: str = "samples"

    def __getattr__(self, name: str) -> Any:
        if name in _TRUTH:
            raise RunError(f"round {self.round}: the server side asked for '{name}', but a defence never sees who is malicious")
        raise AttributeError(name)

    def ask(self, task: str, model: Tensor | None = None, to: Tensor | None = None, **extra: Tensor) -> Exchange:
        """A request to the cohort (or others) with one model for all, or none. The root pseudo-client joins where a rule needs it."""
        to = self.cohort if to is None else to
        if task == "train" and "root" in self.aggregator.needs:
            to = torch.cat([torch.tensor([ROOT]), to])
            extra = {name: torch.cat([value[:1], value]) for name, value in extra.items()}
        return nothing(task, to, self.initial.dtype, **extra) if model is None else broadcast(task, model, to, **extra)

    def judge(self, state: State, up: Uplink, model: Tensor) -> Generator[Exchange, Uplink, tuple[State, Uplink, Verdict]]:
        """Run the attached detectors one after the other; each sees only those whom the ones before let pass."""
        banned: dict[int, str] = {}
        scores: dict[str, Tensor] = {}
        for place, detector in enumerate(self.detectors):
            own = _under(state, f"detector{place}/")
            people = up.ids != ROOT
            models = up["update"][people] + model[: self.wire.parameters]
            said = yield from detector.judge(own, self, models, up.ids[people])
            state = _without(state, f"detector{place}/") | {f"detector{place}/{k}": v for k, v in said.state.items()}
            banned |= said.banned
            scores |= {f"{detector.name}/{k}": _on(v, up.ids[people], up.ids) for k, v in said.scores.items()}
            up = up.only(~torch.isin(up.ids, torch.tensor(list(said.banned), dtype=torch.int64)))
        return state, up, Verdict(up.ids, scores=scores, banned=banned)

    def reduce(self, state: State, up: Uplink, model: Tensor, verdict: Verdict | None = None) -> Merged:
        """The experiment's aggregator on the updates; buffers are averaged with the weights the rule returned."""
        verdict = verdict or Verdict(up.ids)
        people = up.ids != ROOT
        root = up["update"][~people][0] if bool((~people).any()) else None
        up = up.only(people)
        if len(up) == 0:
            return Merged(model, state, replace(verdict, ids=up.ids, weights=torch.zeros(0), notes=(*verdict.notes, "nobody answered")))
        p = self.wire.parameters
        ctx = AggregationContext(
            up.ids, model[:p], self.layout, self.key.fold("aggregator"), self.round, self.aggregator.assumed(len(up)), root
        )
        value, weights, own, fallback = self.aggregator(up["update"], self.priors(up), _under(state, "aggregator/"), ctx)
        fresh = model.clone()
        fresh[:p] += self.server_lr * value
        total = weights.sum()
        if self.wire.buffers and bool(total > 0):
            fresh[p:] = (weights / total).to(fresh.dtype) @ up["buffers"]
        notes = verdict.notes if self.aggregator.uses_priors else (*verdict.notes, f"{self.aggregator.name} ignores sample counts")
        state = _without(state, "aggregator/") | {f"aggregator/{k}": v for k, v in own.items()}
        return Merged(fresh, state, replace(verdict, ids=up.ids, weights=weights, notes=notes, fallback=fallback))

    def priors(self, up: Uplink) -> Tensor:
        """Weights before any rule: the share of samples a client says it has, or equal ones."""
        n = len(up)
        count = up["count"] if self.weighting == "samples" and "count" in up.fields else torch.ones(n, dtype=self.initial.dtype)
        total = count.sum()
        return count / total if bool(total > 0) else torch.full((n,), 1.0 / n, dtype=self.initial.dtype)


def _under(state: Mapping[str, Tensor], prefix: str) -> State:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _without(state: Mapping[str, Tensor], prefix: str) -> State:
    return {name: value for name, value in state.items() if not name.startswith(prefix)}


def _on(values: Tensor, ids: Tensor, all_ids: Tensor) -> Tensor:
    """Scores of some ids laid out over all ids, NaN for the others."""
    out = torch.full((len(all_ids),), float("nan"), dtype=torch.float64)
    out[torch.isin(all_ids, ids)] = values.double()
    return out
