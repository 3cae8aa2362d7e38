"""What a detector is: it looks at the models of a round, may ask clients for help, and names those to ban."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from holdfast.core.registry import Part
from holdfast.core.types import Exchange, State, Uplink


@dataclass(frozen=True)
class Judgement:
    """A detector's word on one round: its memory, the clients it bans with a reason, and its scores by name.

    A score is higher for a client that is suspected more, because the area under its ROC curve is measured that way."""

    state: State
    banned: Mapping[int, str] = field(default_factory=dict)
    scores: Mapping[str, Tensor] = field(default_factory=dict)


class Detector(Part):
    """Used by `yield from`, so a test that only computes and one that asks a committee are the same kind of object."""

    def init(self) -> State:
        return {}

    def judge(self, state: State, ctx: Any, models: Tensor, ids: Tensor) -> Generator[Exchange, Uplink, Judgement]:
        """`models` are the clients' models [n, d] as the server would see them after this round."""
        yield from ()
        raise TypeError(f"{type(self).__name__} does not say how it judges")
