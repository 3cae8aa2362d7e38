"""Training one part of a model while the other stands still, and the tuning of a common model after the last
round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from holdfast.core.types import State, Steps
from holdfast.local.client import Local, Received
from holdfast.local.fit import Fitted
from holdfast.methods.context import Context

Tuned = Literal["head", "all"]


def fit_part(local: Local, model: Tensor, part: Tensor, **options: Any) -> Fitted:
    """Train the entries in `part` (bool[size]). The rest stays to the last number, running statistics
    included: those change by being looked through, not by gradients, so freezing the parameters alone would
    not keep them."""
    fitted = local.fit(model, trainable=part, **options)
    return replace(fitted, model=torch.where(part.to(model.device), fitted.model, model))


def tune(local: Local, model: Tensor, what: Tuned, epochs: int) -> Fitted:
    """A client's own tuning of the model that all have in common."""
    return (
        local.fit(model, epochs=epochs)
        if what == "all"
        else fit_part(local, model, local.network.head, epochs=epochs)
    )


def tuned_or_newest(local: Local, state: State, received: Received) -> Tensor:
    """What such a client uses: its tuned model; before that, the body it is sent, or was sent last, under the
    common head."""
    own = state["tuned"] | ~received.has.to(state["tuned"].device)
    return torch.where(own[:, None], state["own"], received.into(local.initial))


def ask_to_tune(state: State, ctx: Context, epochs: int) -> Steps[State]:
    """The end of a run: everybody who is there tunes the last model, not only a cohort."""
    if epochs:
        yield ctx.ask("tune", state["model"], ctx.available)
    return state
