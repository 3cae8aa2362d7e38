"""What a server half is given in a round. It holds no ground truth, and nothing in it leads to any."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Assessment, Reduced
from holdfast.aggregators.reduction import Candidates, Reduction
from holdfast.aggregators.similarity import Lengths
from holdfast.core.columns import reads_of, sharing, warn_of_rows
from holdfast.core.device import on_host, to_device
from holdfast.core.errors import ConfigError
from holdfast.core.flat import Layout, Wire
from holdfast.core.generators import relay
from holdfast.core.guard import Guarded
from holdfast.core.keys import Key
from holdfast.core.together import Computation, alone
from holdfast.core.types import ASSESS, ROOT, Exchange, State, Steps, T, Uplink, Verdict, broadcast, nothing
from holdfast.detectors.base import Detector, named
from holdfast.evaluation.probe import Probe
from holdfast.server_optimizers.base import ServerOptimizer

OPTIMIZER = "optimizer/"  # where a server's state keeps what its optimiser remembers
OWN = "method-detector"  # where a server's state keeps what the method's own detectors remember


@dataclass(frozen=True)
class Merged:
    """The outcome of one reduction: the new model, the aggregator's memory inside the state, and the
    verdict."""

    model: Tensor
    state: State
    verdict: Verdict
    aggregate: Tensor | None = None
    """What the aggregator returned, before the server's step; None where no update was used."""


class Timer:
    """Counts the server's seconds by stage: aggregate, calibrate, detect. No decision depends on it."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def computing(self, name: str, computation: Computation) -> Generator[Computation, Any, Any]:
        """Ask for a computation and count its seconds."""
        found = yield computation
        self.add(name, computation.seconds)
        return found

    def steps(self, name: str, steps: Steps[T]) -> Steps[T]:
        """The same for a generator; waiting for clients does not count."""

        def ask(request: Any) -> Steps[Any]:
            reply = yield request
            if isinstance(request, Computation):
                self.add(name, request.seconds)
            return reply

        return (yield from relay(steps, ask, lambda: self.part(name)))

    def add(self, name: str, seconds: float) -> None:
        self.spent[name] = self.spent.get(name, 0.0) + seconds


@dataclass(frozen=True)
class Context(Guarded):
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
    server: ServerOptimizer | None = None
    """The server's optimiser; without one, the model moves by server_lr times the aggregate."""
    weighting: str = "samples"
    timer: Timer = field(default_factory=Timer)
    reference: Tensor | None = None
    """While detectors judge: the model that the judged ones are compared with, as far as it is parameters."""
    head: Tensor | None = None
    """bool: which of the parameters that travel belong to the network's head, where it has one."""
    probe: Probe | None = None
    """What lets models answer inputs that the server makes up."""
    buffers: Tensor | None = None
    """While detectors judge: the buffers [n, b] of the judged models."""
    refused: Mapping[int, str] = field(default_factory=dict)
    """While detectors judge: clients whose replies screening refused, and why. They have no model, but may be
    banned."""
    counts: Tensor | None = None
    """While detectors judge: the numbers of samples that the judged clients report, where they do."""

    def on_host(self) -> Context:
        """The same with its tensors in the host's memory."""
        names = ("initial", "head", "reference", "buffers")
        held = {name: value for name in names if (value := getattr(self, name)) is not None}
        changes: dict[str, Any] = dict(on_host(held))
        return replace(self, **changes)

    def ask(
        self, task: str, model: Tensor | None = None, to: Tensor | None = None, **extra: Tensor
    ) -> Exchange:
        """A request to the cohort (or others) with one model for all, or none. The root pseudo-client joins
        where a rule needs it."""
        to = self.cohort if to is None else to
        if task == "train" and "root" in self.aggregator.needs and len(to):
            to = torch.cat([torch.tensor([ROOT]), to])
            extra = {name: torch.cat([value[:1], value]) for name, value in extra.items()}
        return (
            nothing(task, to, self.initial.dtype, **extra)
            if model is None
            else broadcast(task, model, to, **extra)
        )

    def judge(
        self, state: State, up: Uplink, model: Tensor, own: tuple[Detector, ...] = ()
    ) -> Steps[tuple[State, Uplink, Verdict]]:
        """Run the method's own detectors and then the attached ones; each sees only clients that passed the
        ones before. Returns the replies of clients that passed all."""
        clients, (start, held) = up.clients(), self.wire.split(model)
        start = start if up.columns is None else up.columns.mine(start)
        answered, lengths = clients.ids, (yield Lengths(clients["update"], columns=up.columns))
        del clients  # where it is a copy: a cohort may be larger than half of the memory
        refused = {client: reason for client, reason in up.refused.items() if client != ROOT}
        verdict = Verdict(answered)
        scored: dict[str, tuple[Tensor, Tensor]] = {}
        for place, name, detector in self._places(own):
            rows, ids = up.is_client, up.ids[up.is_client]
            counts = up["count"][rows] if "count" in up.fields else None
            buffers = up["buffers"][rows]
            probe = None if self.probe is None else self.probe.of_round(buffers, held)
            seen = replace(
                self, reference=start, buffers=buffers, counts=counts, refused=refused, probe=probe
            )
            models, columns = up["update"][rows] + start, up.columns
            if columns is not None and reads_of(detector) == "rows":
                warn_of_rows(f"detector '{name}'", columns, models.element_size())
                models, seen = columns.whole(models), replace(seen, reference=columns.whole(start))
                columns = None
            if detector.works_on_device():
                judging = detector.judge(_under(state, place), seen, models, ids)
            else:
                own_state = on_host(_under(state, place))
                judging = _with_replies_on_host(detector.judge(own_state, seen.on_host(), models.cpu(), ids))
            judged = yield from self.timer.steps("detect", relay(judging, during=partial(sharing, columns)))
            state = _without(state, place) | {f"{place}{k}": v for k, v in judged.state.items()}
            scored |= {f"{name}/{k}": (v, ids) for k, v in judged.scores.items()}
            verdict = replace(
                verdict,
                banned={**judged.banned, **verdict.banned},
                rejected={**judged.rejected, **verdict.rejected},  # the first reason stays
                tables={**verdict.tables, **_named(name, judged.tables, ids)},
            )
            out = torch.tensor([*judged.banned, *judged.rejected], dtype=torch.int64)
            up = up.only(~torch.isin(up.ids, out))
        unseen = torch.tensor([c for c in verdict.banned if c in refused], dtype=torch.int64)
        all_ids = torch.cat([answered, unseen]).sort().values
        scores = {name: laid_out(*of, all_ids) for name, of in scored.items()}
        tables = {**verdict.tables, "norms": laid_out(lengths, answered, all_ids)}
        return state, up, replace(verdict, ids=all_ids, scores=scores, tables=tables)

    def _places(self, own: tuple[Detector, ...]) -> Iterator[tuple[str, str, Detector]]:
        """Yield for each detector where its memory lies in the state, its name in the verdict, and itself."""
        for i, (name, detector) in enumerate(named((*own, *self.detectors))):
            yield f"{OWN}{i}/" if i < len(own) else f"detector{i - len(own)}/", name, detector

    def reduce(
        self,
        state: State,
        up: Uplink,
        model: Tensor,
        verdict: Verdict | None = None,
        priors: Tensor | None = None,
    ) -> Merged:
        """The same as `merge` in one call, which no other experiment's aggregation is computed with."""
        if "assess" in self.aggregator.needs:
            raise ConfigError(
                f"aggregator '{self.aggregator.name}' asks the server to test models, which ctx.reduce"
                " cannot wait for; let the method yield from ctx.merge, or choose another aggregator"
            )
        return alone(self.merge(state, up, model, verdict, priors))

    def merge(
        self,
        state: State,
        up: Uplink,
        model: Tensor,
        verdict: Verdict | None = None,
        priors: Tensor | None = None,
    ) -> Steps[Merged]:
        """The experiment's aggregator on the updates; buffers are averaged with the weights the rule
        returned, or, where it returned `partial`, move to that mean by the sum of these weights. `priors` are
        a method's own weights of the clients (the root pseudo-client has none), in place of their sample
        counts."""
        clients = up.is_client
        verdict = verdict or Verdict(up.ids[clients])
        root = up["update"][~clients][0] if bool((~clients).any()) else None
        up = up.clients()
        if len(up) == 0:
            refused = any(client != ROOT for client in up.refused)
            reason = "no update was used" if len(verdict.ids) or refused else "no client answered"
            weights = torch.zeros(len(verdict.ids), dtype=torch.float64)
            return Merged(
                model,
                state,
                replace(
                    verdict, weights=weights, notes=(*verdict.notes, f"{reason}: the model stays as it was")
                ),
            )
        p = self.wire.parameters
        ctx = AggregationContext(
            up.ids,
            model[:p],
            self.wire.layout(self.layout),
            self.key.fold("aggregator"),
            self.round,
            self.aggregator.assumed(len(up)),
            root,
            up.refused,
            None if self.probe is None else self.probe.of_round(up.fields.get("buffers"), model[p:]),
        )
        ignored = "sample counts" if priors is None else "the method's weights"
        priors = self.priors(up) if priors is None else priors
        reduction = Reduction(
            self.aggregator, up["update"], priors, _under(state, "aggregator/"), ctx, up.columns
        )
        found = yield from self.timer.computing("aggregate", reduction)
        if isinstance(found, Candidates):
            models = model.new_empty(len(found.reduced), len(model))
            for row in models:  # each aggregate is let go once its model is made
                row.copy_(self._moved(model, found.reduced.pop(0), state, up, priors, ctx)[0])
            reduction = replace(reduction, assessment=(yield from _assessed(models)))
            found = yield from self.timer.computing("aggregate", reduction)
        with self.timer.part("aggregate"):
            fresh, state = self._moved(model, found, state, up, priors, ctx)
        notes = (
            verdict.notes
            if self.aggregator.uses_priors
            else (*verdict.notes, f"{self.aggregator.name} ignores {ignored}")
        )
        state = _without(state, "aggregator/") | {f"aggregator/{k}": v for k, v in found.state.items()}
        shares = laid_out(found.weights, up.ids, verdict.ids, 0.0)  # a rejected client had no weight
        verdict = replace(verdict, weights=shares, notes=notes, fallback=found.fallback)
        return Merged(fresh, state, verdict, found.value)

    def _moved(
        self,
        model: Tensor,
        found: Reduced,
        state: State,
        up: Uplink,
        priors: Tensor,
        ctx: AggregationContext,
    ) -> tuple[Tensor, State]:
        """The model after the server's step along an aggregate, and the state with what its optimiser
        remembers. Where the weights are not those of the clients, as within a wrapper that hands on mixtures,
        buffers are averaged by the priors."""
        p, fresh = self.wire.parameters, model.clone()
        move, state = self._step(found.value, state)
        fresh[:p] += move
        fresh[:p] = self.aggregator.after_step(fresh[:p], ctx)
        weights = found.weights if len(found.weights) == len(up) else priors
        total = weights.sum()
        if self.wire.buffers and bool(total > 0):
            mean = (weights / total).to(fresh) @ up["buffers"]
            short = found.partial and bool(
                1 - total > len(weights) * torch.finfo(weights.dtype).eps
            )  # not by rounding alone
            fresh[p:] = torch.lerp(fresh[p:], mean, total.to(fresh)) if short else mean
        return fresh, state

    def _step(self, aggregate: Tensor, state: State) -> tuple[Tensor, State]:
        """How far the model moves, and the state with what the server's optimiser remembers. A method may
        scale the aggregate by server_lr, which a config sets for runs without optimiser only."""
        scaled = self.server_lr * aggregate
        if self.server is None:
            return scaled, state
        own = _under(state, OPTIMIZER)
        if not self.server.works_on_device():
            scaled, own = scaled.cpu(), on_host(own)
        move, own = self.server.step(scaled, own)
        state = _without(state, OPTIMIZER) | {f"{OPTIMIZER}{k}": v for k, v in own.items()}
        return to_device(move, aggregate.device), state

    def priors(self, up: Uplink) -> Tensor:
        """Weights before any rule: each client's share of the reported samples, or equal ones."""
        n = len(up)
        count = (
            up["count"]
            if self.weighting == "samples" and "count" in up.fields
            else torch.ones(n, dtype=self.initial.dtype)
        )
        total = count.sum()
        usable = bool(total > 0) and bool(torch.isfinite(total))
        return count / total if usable else torch.full((n,), 1.0 / n, dtype=self.initial.dtype)


def _assessed(models: Tensor) -> Steps[Assessment]:
    """How good these models [m, size] are on the server's own data; of none where its test failed."""
    pick = torch.arange(len(models))[None]
    up = yield Exchange(ASSESS, torch.tensor([ROOT]), models, pick)
    loss, error = up["assess/loss"].flatten(), up["assess/error"].flatten()
    return Assessment(loss.cpu(), error.cpu())


def memory_of(state: Mapping[str, Tensor], place: int = 0) -> State:
    """The memory of the method's own detector at this place, for a method that needs it before the replies
    are judged."""
    return _under(state, f"{OWN}{place}/")


def _with_replies_on_host(steps: Steps[T]) -> Steps[T]:
    """The same generator, for which what clients send is in the host's memory."""

    def ask(request: Any) -> Steps[Any]:
        reply = yield request
        return reply.on_host() if isinstance(reply, Uplink) else reply

    return (yield from relay(steps, ask))


def _under(state: Mapping[str, Tensor], prefix: str) -> State:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _without(state: Mapping[str, Tensor], prefix: str) -> State:
    return {name: value for name, value in state.items() if not name.startswith(prefix)}


def _named(name: str, tables: Mapping[str, Tensor], judged: Tensor) -> State:
    """A detector's tables under its name, with the ids of the clients that it judged."""
    return {f"{name}/{k}": v for k, v in {**tables, "ids": judged}.items()} if tables else {}


def laid_out(values: Tensor, ids: Tensor, all_ids: Tensor, otherwise: float = float("nan")) -> Tensor:
    """Numbers of some ids laid out over all ids."""
    out = torch.full((len(all_ids),), otherwise, dtype=torch.float64)
    out[torch.isin(all_ids, ids)] = values.double().cpu()
    return out
