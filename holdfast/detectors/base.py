"""The base class of detectors: they examine the models of a round, may ask clients for help, and name those
to ban."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from holdfast.core.columns import Reads
from holdfast.core.registry import Part
from holdfast.core.types import State, Steps


@dataclass(frozen=True)
class Judgement:
    """A detector's result for one round: its memory, the clients it bans for good or rejects for this round,
    each with a reason, its suspicions by name (one number per client, more is worse), and other tables for
    pictures."""

    state: State
    banned: Mapping[int, str] = field(default_factory=dict)
    scores: Mapping[str, Tensor] = field(default_factory=dict)
    rejected: Mapping[int, str] = field(default_factory=dict)
    tables: Mapping[str, Tensor] = field(default_factory=dict)


class Detector(Part):
    """Used by `yield from`, so a test that only computes and one that asks a committee are the same kind of
    object."""

    reads: ClassVar[Reads] = "rows"
    """How it reads the models where several processes share them (core/columns.py)."""

    def init(self) -> State:
        return {}

    def judge(self, state: State, ctx: Any, models: Tensor, ids: Tensor) -> Steps[Judgement]:
        """`models` are the clients' models [n, d] as the server would see them after this round, as far as
        they are parameters that travel; `ctx.reference` is what they are compared with, `ctx.buffers` [n, b]
        the buffers that came with them, `ctx.counts` the numbers of samples that these clients report (None
        where they do not). `models`, `ctx.reference` and `ctx.buffers` may be on a device; all that is
        returned is on the host. It yields exchanges, and computations (`core/together.py`)."""
        yield from ()
        raise TypeError(f"{type(self).__name__} does not define how it judges")

    def bounds(self, scores: Mapping[str, Tensor]) -> Mapping[str, float]:
        """The largest score that passes, by the name of the score, for pictures of a round with these
        scores."""
        return {}


def named(detectors: Iterable[Detector]) -> Iterator[tuple[str, Detector]]:
    """Yield each detector with its name in the verdict; the second of a kind is "norm-2"."""
    seen: dict[str, int] = {}
    for detector in detectors:
        seen[detector.name] = seen.get(detector.name, 0) + 1
        yield f"{detector.name}-{seen[detector.name]}" if seen[detector.name] > 1 else detector.name, detector
