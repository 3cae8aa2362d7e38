"""Training one part of a model while the other is frozen, and the tuning of a common model after the last
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

TunedPart = Literal["head", "all"]


def fit_part(local: Local, model: Tensor, part: Tensor, **options: Any) -> Fitted:
    """Train the entries in `part` (bool[size]). The rest does not change at all, running statistics included:
    those change in the forward pass, so freezing the parameters alone would not keep them."""
    fitted = local.fit(model, trainable=part, **options)
    return replace(fitted, model=torch.where(part.to(model.device), fitted.model, model))


def fine_tune(local: Local, model: Tensor, what: TunedPart, epochs: int) -> Fitted:
    """Fine-tune the common model on a client's own samples."""
    return (
        local.fit(model, epochs=epochs)
        if what == "all"
        else fit_part(local, model, local.network.head, epochs=epochs)
    )


def tuned_or_newest_model(local: Local, state: State, received: Received) -> Tensor:
    """The model of such a client: its tuned model; before that, the body that it received, or received last,
    under the common head."""
    own = state["tuned"] | ~received.has.to(state["tuned"].device)
    return torch.where(own[:, None], state["own"], received.into(local.initial))


def ask_to_fine_tune(state: State, ctx: Context, epochs: int) -> Steps[State]:
    """After the last round, ask all available clients, not only a cohort, to fine-tune the model."""
    if epochs:
        yield ctx.ask("tune", state["model"], ctx.available)
    return state
