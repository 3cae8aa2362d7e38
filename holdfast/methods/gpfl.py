"""GPFL. Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan: GPFL: Simultaneously Learning Global and Personalized
Feature Information for Personalized Federated Learning, ICCV 2023.

A conditional valve between the body and the head turns features into two versions by scaling and shifting
them: a generic one, under the mean of common class embeddings, and a personal one, under their mean by the
client's own class shares. The head, which is private, is given the personal version. The generic one is
guided by the embeddings, which are trained too: in its angle, by a softmax of cosines, and in its length, by
the distance to the embedding of the label as it was received. Body, valve and embeddings are averaged."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.core.registry import register, setting
from holdfast.core.types import State
from holdfast.local.client import Local, Received
from holdfast.local.losses import Batch, Loss
from holdfast.methods.averaging import Averaging
from holdfast.methods.base import ClientRule, Fields, Method
from holdfast.models.features import catching
from holdfast.models.heads import ReplacedHead, replace_head
from holdfast.models.network import Network


class Valve(ReplacedHead):
    """A head behind a conditional valve. The conditions are no parameters: a client works them out from the
    embeddings it receives."""

    generic: Tensor
    personal: Tensor

    def __init__(self, head: nn.Module, classes: int, features: int):
        super().__init__(head)
        self.scale, self.shift = (
            nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.LayerNorm(features)) for _ in range(2)
        )
        self.embedding = nn.Parameter(torch.randn(classes, features))
        self.register_buffer("generic", torch.zeros(features))
        self.register_buffer("personal", torch.zeros(features))

    def through(self, features: Tensor, condition: Tensor) -> Tensor:
        return F.relu(features * (self.scale(condition) + 1) + self.shift(condition))

    def forward(self, features: Tensor) -> Tensor:
        return self.inner(self.through(features.flatten(1), self.personal))


def guided(net: nn.Module, batch: Batch, *, loss: Loss, head: str, length: str) -> Tensor:
    """The usual loss of the personal version, the generic one's guidance in angle and length, and the decay
    of valve and embeddings."""
    with catching(net, head) as found:
        values = loss(net, batch)
    valve, aux = net.get_submodule(head), batch.aux
    assert isinstance(valve, Valve)
    generic = valve.through(found[0], valve.generic)
    cosines = F.normalize(generic) @ F.normalize(valve.embedding).T
    off = (generic - aux["embedding"][batch.y]) * batch.mask[:, None]
    far = torch.linalg.vector_norm(off) if length == "batch" else torch.linalg.vector_norm(off, dim=1)
    decay = sum(
        p.square().sum() for p in (valve.embedding, *valve.scale.parameters(), *valve.shift.parameters())
    )
    return (
        values
        + F.cross_entropy(cosines, batch.y, reduction="none")
        + aux["lam"] * far
        + aux["mu"] / 2 * decay
    )


class GPFLClient(ClientRule):
    """Train everything under the conditions that the received embeddings give; keep the head."""

    method: GPFL

    def network(self, module: nn.Module) -> nn.Module:
        return replace_head(module, self.head_name, Valve)

    def shared(self, network: Network, round: int) -> Tensor:
        head, layout = network.head_name, network.layout
        return ~(
            layout.under(f"{head}.inner") | layout.under(f"{head}.generic") | layout.under(f"{head}.personal")
        )

    def init(self, local: Local) -> State:
        return {"own": local.initial}

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        start, head = self.handed(local, state["own"], received), local.network.head_name or ""
        loss = partial(guided, loss=local.recipe.loss, head=head, length=self.method.length)
        aux = {"embedding": local.network.layout.unflatten(start)[f"{head}.embedding"]}
        aux |= {name: getattr(local.settings, name).to(start) for name in ("lam", "mu")}
        fitted = local.fit(start, loss=loss, aux=aux)
        return {"own": fitted.model}, local.report(fitted.model, received, fitted)

    def committee_model(self, local: Local, state: State, received: Received) -> Tensor:
        return self.handed(local, state["own"], received)

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return self.handed(local, state["own"], received)

    def handed(self, local: Local, own: Tensor, received: Received) -> Tensor:
        """Each client's model with what it was sent, and the conditions that follow from it; a client that
        was sent nothing keeps its model."""
        layout, head = local.network.layout, local.network.head_name
        model = received.into(own).clone()
        views, has = layout.unflatten(model), received.has.to(model.device)[:, None]
        embedding = views[f"{head}.embedding"]
        mean = torch.einsum("nc,ncd->nd", shares(local, embedding.shape[1]), embedding)
        for name, condition in (("generic", embedding.mean(1)), ("personal", mean)):
            slot = layout.slot(f"{head}.{name}")
            model[:, slot.start : slot.stop] = torch.where(has, condition, views[slot.name])
        return model


def shares(local: Local, classes: int) -> Tensor:
    """[n, classes]: the share of each class in a client's samples; zeros for a client that has none."""
    data = local.data
    count = local.initial.new_zeros(local.n, classes).scatter_add_(
        1, data.labels, data.mask.to(local.initial.dtype)
    )
    return count / count.sum(1, keepdim=True).clamp(min=1)


@register(
    "method",
    "gpfl",
    paper=(
        "Zhang et al., GPFL: Simultaneously Learning Global and Personalized Feature Information, ICCV 2023"
    ),
)
class GPFL(Method):
    """A conditional valve makes a generic and a personal version of the features; common class embeddings
    guide the generic one.

    Body, valve and embeddings travel and are averaged; the head is private, and so are the two conditions of
    the valve, which a client works out anew whenever it receives embeddings. The valve is built around any
    model whose head is named. `lam` and `mu` are those of the common code; the paper tunes both."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "body, valve and class embeddings",
        "what a client keeps": "head and conditions",
        "personal model": "the received part with the own head and conditions",
        "what that says, beyond the update itself": "body, valve and an embedding for every class",
    }
    Client = GPFLClient
    Server = Averaging
    models = ("personal",)
    deploys = "personal"
    search: ClassVar[dict[str, tuple[float, ...]]] = {"lam": (0.001, 0.01, 0.1, 1.0), "mu": (0.0, 0.001, 0.1)}
    lam: float = setting(
        1.0, "strength of the guidance in length: distance of generic features to the label's embedding", ge=0
    )
    mu: float = setting(0.0, "weight decay of valve and embeddings, beside the usual one", ge=0)
    length: Literal["batch", "sample"] = setting(
        "batch", "that distance: of a batch as one long vector (code), or the mean over samples"
    )
