"""The server half that most methods share: send one model to the cohort, reduce the updates, move the
model."""

from __future__ import annotations

from typing import ClassVar

from holdfast.core.columns import Reads
from holdfast.core.types import Round, State
from holdfast.methods.base import ServerRule
from holdfast.methods.context import Context


class Averaging(ServerRule):
    """w <- w + server_lr * aggregate of (w_k - w), by the experiment's aggregator; with `mean` this is
    FedAvg's Algorithm 1."""

    reads: ClassVar[Reads] = "columns"

    def round(self, state: State, ctx: Context) -> Round:
        model = state["model"]
        up = yield ctx.ask("train", model)
        state, up, verdict = yield from ctx.judge(state, up, model)
        merged = yield from ctx.merge(state, up, model, verdict)
        return merged.state | {"model": merged.model}, merged.verdict
