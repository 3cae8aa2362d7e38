"""pFedMe. Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020.

Client i's own model is theta_i(w) = argmin f_i(theta) + lambda/2 ||theta - w||^2, and w follows the gradient
of the value of that, lambda (w - theta_i(w)). Algorithm 1: on each batch, theta is found by K gradient steps;
then w_i <- w_i - eta lambda (w_i - theta); the server mixes: w <- (1 - beta) w + beta mean of w_i."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from holdfast.core.columns import Reads
from holdfast.core.registry import register, setting
from holdfast.core.types import Round, State
from holdfast.local.client import Local, Received
from holdfast.local.gradients import Tensors
from holdfast.local.losses import Batch, Loss
from holdfast.methods.base import ClientRule, Fields, Method, ServerRule
from holdfast.methods.context import Context
from holdfast.models.network import Network
from holdfast.models.pair import OWN, SHARED, Pair, filled, halves, taken

PAPER = "Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020"


def of_theta(net: Pair, batch: Batch, *, loss: Loss) -> Tensor:
    return loss(net.own, batch)


def envelope_step(
    gradient: Callable[[Tensors, Batch], Tensors],
    params: Tensors,
    batch: Batch,
    lr: Tensor,
    *,
    names: tuple[str, ...],
    inner: int,
) -> Tensors:
    """One batch of Algorithm 1: theta from w by `inner` steps, then w towards theta."""
    lam, rate = batch.aux["lam"], batch.aux["inner_lr"]
    w = {name: params[f"{SHARED}.{name}"] for name in names}
    theta = w
    for _ in range(inner):
        grads = gradient({**params, **{f"{OWN}.{name}": value for name, value in theta.items()}}, batch)
        theta = {
            name: value - rate * (grads[f"{OWN}.{name}"] + lam * (value - w[name]))
            for name, value in theta.items()
        }
    moved = {name: value - lr * lam * (value - theta[name]) for name, value in w.items()}
    return {
        **params,
        **{f"{OWN}.{k}": v for k, v in theta.items()},
        **{f"{SHARED}.{k}": v for k, v in moved.items()},
    }


class PFedMeClient(ClientRule):
    """Move w for the federation; keep the last theta for the client itself."""

    models_per_client = 2
    refuses = {
        name: "its steps are its own" for name in ("optimizer", "optimizer.persist", "train.clip_gradient")
    }
    method: PFedMe

    def network(self, module: nn.Module) -> nn.Module:
        return Pair(module)

    def head(self, name: str) -> str:
        return f"{SHARED}.{name}"

    def unwrapped(self, network: nn.Module) -> nn.Module:
        return network.get_submodule(SHARED)

    def shared(self, network: Network, round: int) -> Tensor:
        return network.layout.under(SHARED)

    def init(self, local: Local) -> State:
        return {"theta": taken(local.initial, halves(local.network)[1])}

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        (w, theta), layout = halves(local.network), local.network.layout
        start = received.into(local.initial)
        start = filled(start, theta, taken(start, w))
        trained = [slot.name for slot in layout.slots if not slot.buffer and not slot.frozen]
        names = tuple(name.removeprefix(f"{OWN}.") for name in trained if name.startswith(f"{OWN}."))
        fitted = local.fit(
            start,
            loss=partial(of_theta, loss=local.recipe.loss),
            step=partial(envelope_step, names=names, inner=self.method.inner_steps),
            aux={
                "lam": local.settings.lam.to(start.dtype),
                "inner_lr": local.settings.inner_lr.to(start.dtype),
            },
        )
        mine = taken(fitted.model, theta)
        buffers = (w >= layout.parameters).nonzero().flatten()
        sent = filled(
            fitted.model, w[buffers], taken(mine, buffers)
        )  # the batches went through theta: its running statistics are w's too
        return {"theta": mine}, local.report(sent, received, fitted)

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        """theta, in the place of w, whose tensors predict."""
        return filled(local.initial, halves(local.network)[0], state["theta"])


class PFedMeServer(ServerRule):
    """Averaging with a step of beta."""

    reads: ClassVar[Reads] = "columns"
    method: PFedMe

    def round(self, state: State, ctx: Context) -> Round:
        model = state["model"]
        up = yield ctx.ask("train", model)
        state, up, verdict = yield from ctx.judge(state, up, model)
        merged = yield from ctx.merge(state, up, model, verdict)
        (old, _), (new, buffers) = ctx.wire.split(model), ctx.wire.split(merged.model)
        mixed = torch.cat([old + self.method.beta * (new - old), buffers])
        return merged.state | {"model": mixed}, merged.verdict


@register("method", "pfedme", paper=PAPER)
class PFedMe(Method):
    """A common model that is good to start from, and private ones that are found near it.

    Only the common model travels. Each local step solves a small problem by `inner_steps` passes over one
    batch, so a round costs that many times FedAvg's; `inner_lr` times `lam`, and `train.lr` times `lam`,
    should stay below 2. The steps are the paper's: momentum and weight decay of [train] are not used. theta
    starts from w on every batch; the authors' code goes on from the last batch's theta. One inner step with
    inner_lr = 1 / lam and beta = 1 is FedAvg."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "the model",
        "what a client keeps": "theta, found from it by inner steps on every batch",
        "personal model": "theta",
        "what that says, beyond the update itself": "theta stays",
    }
    Client = PFedMeClient
    Server = PFedMeServer
    models = ("global", "personal")
    deploys = "personal"
    search: ClassVar[dict[str, tuple[Any, ...]]] = {"lam": (5.0, 15.0, 30.0), "beta": (1.0, 2.0)}
    lam: float = setting(
        15.0, "how strongly the private model is held near the common one (paper: 15 to 30)", gt=0
    )
    inner_lr: float = setting(0.01, "learning rate of the private model (PFLlib: 0.01)", gt=0)
    inner_steps: int = setting(5, "K: gradient steps for the private model on each batch (paper: 5)", ge=1)
    beta: float = setting(
        1.0, "how far the server moves to the average; more than 1 goes beyond it (paper: 1 or 2)", gt=0
    )

    def without_server_optimizer(self) -> str:
        return "" if self.beta == 1 else f"has a step of its own, beta = {self.beta:g}; set it to 1"
