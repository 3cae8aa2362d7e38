"""The base class of aggregators: rules that turn the clients' updates [n, d] into one, and return the weight
that each client had in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import field_validator, model_validator
from torch import Tensor

from holdfast.aggregators import ordered
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
from holdfast.core.flat import Layout
from holdfast.core.guard import Guarded
from holdfast.core.keys import Key
from holdfast.core.registry import Part, setting
from holdfast.core.together import stacked
from holdfast.core.types import State
from holdfast.evaluation.probe import Probe


class Assessment(NamedTuple):
    """How models do on the server's own data: their mean losses and error rates, [m] each, in float64 on the
    host; of no models where the server's own test failed."""

    loss: Tensor
    error: Tensor


@dataclass(frozen=True)
class AggregationContext(Guarded):
    """What a rule may know beside the updates. Nothing here shows which clients are malicious."""

    ids: Tensor
    received: Tensor
    """The model the updates start from, [d]."""
    layout: Layout
    """Where the tensors lie among the columns."""
    key: Key
    round: int
    assumed: int
    """How many of these clients the operator believes to be malicious."""
    root: Tensor | None = None
    """The update of the server's own data, for rules that declare needs = {"root"}."""
    refused: Mapping[int, str] = field(default_factory=dict)
    """Clients whose replies screening refused, and why."""
    probe: Probe | None = None
    """What lets models answer made-up inputs; None where a rule is called by hand, outside of a run."""
    assess: Assess | None = None
    """For rules that declare needs = {"assess"}: asks how good the models are that some aggregates would
    give. What makes the aggregates is called only where the answer is not known yet."""

    def of_mixtures(self) -> AggregationContext:
        """The same for mixtures of the updates: no client's buffers belong to these."""
        return self if self.probe is None else replace(self, probe=self.probe.of_mixtures())


class Reduced(NamedTuple):
    """The aggregate [d], the weight each client had in it [n], and the rule's memory."""

    value: Tensor
    weights: Tensor
    state: State
    fallback: bool = False
    partial: bool = False
    """Weights that sum to less than 1 leave the rest to the model sent, in its buffers, too; if not, buffers
    are a mean by the weights."""


Assess = Callable[[Callable[[], Sequence[Reduced]]], Assessment]


class Aggregator(Part):
    """A rule on [n, d]; any n from 1 upwards (the server keeps its model when no client answered)."""

    needs: ClassVar[frozenset[str]] = frozenset()
    """What it needs beside the updates: "root", the update of the server's own data; "assess", tests of
    models on that data."""
    uses_priors: ClassVar[bool] = True
    """Whether the incoming weights matter; a rule that ignores them says so, and the verdict notes it."""
    reads: ClassVar[Reads] = "rows"
    """How it reads the updates where several processes share them. What is not "rows" is handed columns of
    all updates, and asks about lengths, products and counts through `geometry` and `ordered` only."""
    coordinatewise: ClassVar[bool] = False
    """Whether every coordinate of the aggregate depends on that coordinate of the updates only."""
    in_places: ClassVar[bool] = False
    """Whether it needs all coordinates in their places, as to pass inputs through models."""
    condition: ClassVar[str] = "n >= 1"
    """When the rule's guarantee holds, for n clients of which f are malicious, in words; `least` gives it as
    a number."""
    keeps: ClassVar[frozenset[str]] = frozenset()
    """What the rule guarantees with default settings. shift: adding a vector to all updates adds it to the
    aggregate. scale: multiplying all updates multiplies the aggregate. hull: f clients, however far out, move
    no coordinate beyond what honest clients sent."""
    weights: Literal["samples", "uniform"] = setting(
        "samples", "weights before the rule: each client's share of samples, or equal ones"
    )
    f: float | None = setting(None, "assumed attackers: a number (>= 1) or a share of the cohort (< 1)", ge=0)

    def init(self, layout: Layout) -> State:
        return {}

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        raise TypeError(f"{type(self).__name__} does not define how it aggregates")

    def together(
        self,
        x: Tensor,
        w: Tensor,
        states: Sequence[State],
        contexts: Sequence[AggregationContext],
    ) -> list[Reduced] | None:
        """The same for several experiments with equal rules and equally many clients: x [c, n, d], w [c, n].
        None: not for these; then they are reduced one after the other."""
        return None

    def after_step(self, model: Tensor, ctx: AggregationContext) -> Tensor:
        """The parameters [d] of the model after the server's step, as they are sent from now on; always
        whole, also where several processes share the updates."""
        return model

    def least(self, f: int) -> int:
        """The fewest clients of which f may be malicious."""
        return 1

    def enough(self, n: int) -> bool:
        """Whether a cohort of n meets the condition; where one does not, the rule falls back."""
        return n >= self.least(self.assumed(n))

    def fall_back(self, x: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        """For cohorts that are too small: the coordinate-wise median, which needs no f and no more than one
        client."""
        return Reduced(*ordered.median(x, ctx.ids), state, fallback=True)

    def fall_back_together(
        self, x: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        value, weights = ordered.median(x, ids_of(contexts))
        return separate(value, weights, states, [True] * len(states))

    @field_validator("f")
    @classmethod
    def _sensible(cls, f: float | None) -> float | None:
        return whole_or_share(f)

    @model_validator(mode="after")
    def _some_cohort_is_enough(self) -> Self:
        if not self.enough(10**6):
            raise ValueError(
                f"{self.name} needs {self.condition}, which no cohort meets with f = {self.f or 0:g};"
                " lower it"
            )
        return self

    def idle(self) -> bool:
        """Whether it leaves out f clients and no f is set: then it would be the plain mean without notice."""
        return False

    def assumed(self, n: int) -> int:
        return 0 if self.f is None else how_many(self.f, n)

    def remembers(self) -> str:
        """What its memory is about: "clients" by their ids, "model" (a vector of the model's size), or "" for
        none."""
        return ""

    def trusts(self) -> int | None:
        """The client, by its id, on whose update the others depend; None for no such client."""
        return None

    def layers(self) -> tuple[Aggregator, list[Wrapper]]:
        """The innermost rule and the wrappers around it, from the inside out: as a config spells them."""
        return self, []


def ids_of(contexts: Sequence[AggregationContext]) -> Tensor:
    """[c, n]: the ids of several experiments' clients."""
    return torch.stack([ctx.ids for ctx in contexts])


def vectors(parts: Sequence[Tensor], x: Tensor) -> Tensor:
    """Several experiments' tensors as one, with the device and the dtype of x; not to be written to."""
    return stacked([to_device(part, x.device).to(x.dtype) for part in parts])


def separate(
    values: Tensor,
    weights: Tensor,
    states: Sequence[State],
    fallbacks: Sequence[bool] | None = None,
) -> list[Reduced]:
    """Results [c, d] and weights [c, n] of several experiments, one by one."""
    fell = fallbacks or [False] * len(states)
    return [Reduced(*each) for each in zip(values, weights, states, fell, strict=True)]


def how_many(f: float, n: int) -> int:
    """A number (>= 1), or a share (< 1) of n."""
    return int(f) if f >= 1 else int(f * n + 1e-9)  # 0.29 * 100 is 28.999...


def whole_or_share(f: float | None) -> float | None:
    """For validators: 1.5 is neither a number of clients nor a share of them."""
    if f is not None and f > 1 and f != int(f):
        raise ValueError("a number of clients is whole, and a share of them is below 1")
    return f


class Wrapper(Part):
    """Maps an aggregator to an aggregator."""

    reads: ClassVar[Reads] = "rows"
    """How it reads the updates, apart from what the rule inside does."""

    def __call__(self, inner: Aggregator) -> Aggregator:
        raise TypeError(f"{type(self).__name__} does not define how it wraps")
