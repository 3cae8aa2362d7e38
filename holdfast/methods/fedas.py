"""FedAS. Yang, Huang, Ye: FedAS: Bridging Inconsistency in Personalized Federated Learning, CVPR 2024.

A shared backbone theta under private heads omega_i. Two problems are solved. A client that receives theta^t
has a head that was trained on the features of its own last backbone: before training, it pulls the new
backbone's features to those (parameter alignment, Eq. 2-4). And a client that has hardly trained should not
count like the others: backbones are averaged by the trace of the Fisher information, which each client
measures on its own model (client synchronisation, Eq. 5-8). Without either this is FedPer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from holdfast.core.flat import Wire
from holdfast.core.recorded_table import RecordedTable
from holdfast.core.registry import register, setting
from holdfast.core.types import Field, Round, Schema, State, Steps, Uplink, Verdict, broadcast
from holdfast.evaluation.prototypes import prototypes, width_of
from holdfast.local.augment import Augment
from holdfast.local.client import Local, Received
from holdfast.local.fisher import Definition, trace
from holdfast.local.fit import Fitted
from holdfast.local.losses import Batch, Loss
from holdfast.methods.base import ClientRule, Fields, Method, ServerRule
from holdfast.methods.context import Context, laid_out
from holdfast.models.channels import channels
from holdfast.models.features import catching, features
from holdfast.models.network import Network

WAS = "was."


def misaligned(
    net: nn.Module, batch: Batch, *, head: str | None, target: str, reduce: str, mode: str = "training"
) -> Tensor:
    """The loss of alignment before training."""
    with _evaluating(net) if mode == "evaluation" else nullcontext():
        found = features(net, batch.x, head)
    return _apart(found, net, batch, head, target, reduce)


def jointly(
    net: nn.Module, batch: Batch, *, loss: Loss, head: str | None, target: str, reduce: str
) -> Tensor:
    """The loss of training with alignment as one more term, of the same pass."""
    with catching(net, head) as found:
        values = loss(net, batch)
    return values + batch.aux["aligning"] * _apart(found[0], net, batch, head, target, reduce)


def _apart(found: Tensor, net: nn.Module, batch: Batch, head: str | None, target: str, reduce: str) -> Tensor:
    """Eq. 4, |f(theta; D_i) - H_i|^2, as one value per sample of which `fit` takes the mean. H_i are class
    means (the authors' code) or the sample's own features (the paper). `mean` is the code's: the mean over
    the features and the samples of a class, summed over the classes that the batch has."""
    aim = batch.aux["prototypes"][batch.y] if target == "prototype" else _earlier(net, batch, head)
    apart, size = (found - aim).square(), batch.mask.sum()
    if "known" in batch.aux:  # a class that has no mean pulls nothing
        apart = apart * batch.aux["known"][batch.y][:, None]
    if reduce == "sum":
        return apart.sum(1) * size
    if target == "sample":
        return apart.mean(1)
    alike = (batch.y[:, None] == batch.y[None, :]).to(batch.mask.dtype) @ batch.mask
    return apart.mean(1) * size / alike.clamp(min=1)


@contextmanager
def _evaluating(net: nn.Module) -> Iterator[None]:
    training = net.training
    net.eval()
    try:
        yield
    finally:
        net.train(training)


def _earlier(net: nn.Module, batch: Batch, head: str | None) -> Tensor:
    """H_i of this batch (Eq. 2): the features of the samples by another model, which is in `aux`; nothing is
    kept of all the others."""
    tensors = {name.removeprefix(WAS): value for name, value in batch.aux.items() if name.startswith(WAS)}
    with _evaluating(net), torch.no_grad():
        return features(net, batch.x, head, tensors)


class FedASClient(ClientRule):
    """Align the received backbone, train it under the own head, report how much the model knows."""

    tasks = frozenset({"train", "align"})
    begins_unsent = True
    method: FedAS

    def shared(self, network: Network, round: int) -> Tensor:
        return ~network.head if self.method.decoupling == "head" else channels(network, 1 - self.method.rho)

    def init(self, local: Local) -> State:
        """`own` is the last trained model, `trained` whether there has been a training, `start` where a chain
        of alignments led to."""
        if self.method.align != "off":
            width_of(
                local.network, local.initial, local.samples, self._head(local)
            )  # no features: an error now, not in a later round
        start = {"start": local.initial} if self.method.align == "serial" else {}
        return {
            "own": local.initial,
            "trained": torch.zeros(local.n, dtype=torch.bool, device=local.initial.device),
            **start,
        }

    def schema(self, task: str, wire: Wire) -> Schema:
        usual = super().schema(task, wire)
        if task == "align":
            return {name: usual[name] for name in ("update", "buffers")}
        return {**usual, "fim": Field("score", low=0)} if self.method.synchronise else usual

    def align(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        """One link of a chain: the backbone as this client leaves it for the next."""
        start = self._aligned(local, state, received.into(state["own"]), received.has)
        aligned, buffers = local.wire.split(local.wire.pack(start))
        update = aligned - local.wire.split(received.model)[0]
        return {**state, "start": start}, {"update": update, "buffers": buffers}

    def as_sent(self, local: Local, state: State, received: Received) -> tuple[Tensor, Tensor]:
        """A link of a chain continues from its aligned model, and reports the change from there."""
        begun = received.into(state["own"])
        if bool(received.has.all()):
            return begun, received.model
        begun = torch.where(received.has.to(begun.device)[:, None], begun, state["start"])
        return begun, local.wire.pack(begun)

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        begun, sent = self.as_sent(local, state, received)
        base = received
        if not bool(received.has.all()):
            base = replace(received, bank=sent, pick=torch.arange(local.n)[:, None])
        fitted = self._trained(local, state, begun, received.has)
        reply = local.report(fitted.model, base, fitted)
        if self.method.synchronise:
            known = trace(
                local.network,
                fitted.model,
                local.samples,
                local.data,
                local.recipe,
                local.plan,
                self.method.fim,
            )  # Eq. 5, 6
            reply["fim"] = known.to(fitted.model.dtype)
        return {**state, "own": fitted.model, "trained": torch.ones_like(state["trained"])}, reply

    def committee_model(self, local: Local, state: State, received: Received) -> Tensor:
        return received.into(state["own"])

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return state["own"]

    def _trained(self, local: Local, state: State, begun: Tensor, who: Tensor) -> Fitted:
        if self.method.align == "off":
            return local.fit(begun)
        if self.method.align != "joint":
            return local.fit(self._aligned(local, state, begun, who))
        who = self._aligning(state, who)
        told, aux = self._aim(local, state, begun)
        aux["aligning"] = who.to(begun)
        return local.fit(begun, loss=partial(jointly, loss=local.recipe.loss, **told), aux=aux)

    def _aligned(self, local: Local, state: State, start: Tensor, who: Tensor) -> Tensor:
        """theta~_i, Eq. 3: these clients' models after alignment, `align_epochs` of plain SGD on what is
        shared."""
        method, layout = self.method, local.network.layout
        who = self._aligning(state, who)
        if not bool(who.any()) or not method.align_epochs:
            return start
        told, aux = self._aim(local, state, start)
        shared = torch.zeros(layout.size, dtype=torch.bool)
        shared[local.wire.index.cpu()] = True
        aligned = local.fit(
            start,
            purpose="align",
            loss=partial(misaligned, **told, mode=method.align_mode),
            lr=local.settings.align_lr,
            epochs=torch.where(who, method.align_epochs, 0),
            batch_size=method.align_batch_size,
            augment=Augment(),
            **local.plain_sgd,
            trainable=shared,
            aux=aux,
        ).model
        if method.align_statistics:
            return aligned
        return torch.cat([layout.split(aligned)[0], layout.split(start)[1]], 1)

    def _aligning(self, state: State, who: Tensor) -> Tensor:
        """Those of `who` that have features to align to."""
        return (
            who & state["trained"].cpu()
            if self.method.first == "skip" and self.method.align_to == "own"
            else who
        )

    def _head(self, local: Local) -> str | None:
        return local.network.head_name if self.method.decoupling == "head" else None

    def _aim(self, local: Local, state: State, start: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """H_i, Eq. 2: the losses' arguments, and their tensors in `aux`."""
        method, network, target = self.method, local.network, state["own"]
        head = self._head(local)
        if method.align_to == "global":
            target = start
        elif method.first == "received":
            target = torch.where(state["trained"][:, None], target, start)
        if method.align_target == "prototype" and method.align_means == "whole-batches":
            whole = replace(local.data, count=local.count - local.count % method.align_batch_size)
            found = prototypes(network, target, local.samples, whole, local.plan, head)
            aux = {"prototypes": found.means, "known": (found.counts > 0).to(found.means)}
        elif method.align_target == "prototype":
            aux = {
                "prototypes": prototypes(network, target, local.samples, local.data, local.plan, head).means
            }
        else:
            aux = {f"{WAS}{name}": value for name, value in network.layout.tensors(target).items()}
        return {"head": head, "target": method.align_target, "reduce": method.align_loss}, aux


class FedASServer(ServerRule):
    """Average the backbones by what their owners know."""

    method: FedAS

    def round(self, state: State, ctx: Context) -> Round:
        model = state["model"]
        up = yield from (
            self._aligned_in_turn(ctx, model) if self.method.align == "serial" else _asked(ctx, model)
        )
        answered = up.clients()
        state, up, verdict = yield from ctx.judge(state, up, model)
        passed = up.clients()
        priors, verdict = (
            self._weighed(ctx, answered, passed, verdict) if self.method.synchronise else (None, verdict)
        )
        if self.method.extra_1_over_m:  # Eq. 8 as printed, although the weights sum to 1 already
            ctx = replace(ctx, server_lr=ctx.server_lr / max(1, len(passed)))
        merged = yield from ctx.merge(state, up, model, verdict, priors)
        return merged.state | {"model": merged.model}, merged.verdict

    def _weighed(
        self, ctx: Context, answered: Uplink, passed: Uplink, verdict: Verdict
    ) -> tuple[Tensor | None, Verdict]:
        """The weights of clients that passed, and a record of all traces and weights. None: the traces are
        not usable."""
        method, alpha = self.method, torch.zeros(len(answered), dtype=torch.float64)
        weights = shares(passed["fim"].double(), method.normalise, method.temperature, method.clip)  # Eq. 7
        if len(passed):
            alpha[torch.isin(answered.ids, passed.ids)] = (
                ctx.priors(passed).double() if weights is None else weights
            )
        silent = (
            ("the Fisher traces sum to 0 or are not finite: clients count by samples",)
            if len(passed) and weights is None
            else ()
        )
        told = {
            "fim": laid_out(answered["fim"], answered.ids, verdict.ids),
            "alpha": laid_out(alpha, answered.ids, verdict.ids, 0.0),
        }
        verdict = replace(verdict, tables={**verdict.tables, **told}, notes=(*verdict.notes, *silent))
        return None if weights is None else weights.to(ctx.initial.dtype), verdict

    def _aligned_in_turn(self, ctx: Context, model: Tensor) -> Steps[Uplink]:
        """The authors' in-place alignment: each client, in the order of ids, aligns what the one before it
        left, and trains from there. One exchange for each link; what a client aligned it has, and is not sent
        again."""
        at, starts = model, {}
        for client in ctx.cohort:
            link = yield broadcast("align", at, client[None])
            if len(link):
                at = ctx.wire.moved(at, link["update"][0], link["buffers"][0])
                starts[int(client)] = ctx.wire.split(at)[0]
        asked = ctx.ask("train", model, torch.tensor(list(starts), dtype=torch.int64))
        up = yield replace(asked, pick=torch.where(asked.is_client[:, None], -1, asked.pick))
        if not len(up):
            return up
        common = ctx.wire.split(model)[0]  # from which the server's own pseudo-client trains
        led = torch.stack([starts.get(client, common) for client in up.ids.tolist()])
        return up.having(update=up["update"] + (led - common))


def _asked(ctx: Context, model: Tensor) -> Steps[Uplink]:
    return (yield ctx.ask("train", model))


def shares(
    traces: Tensor, normalise: str, temperature: float = 1.0, clip: float | None = None
) -> Tensor | None:
    """alpha' of Eq. 7: weights that sum to 1; None where the traces are not usable. `clip` is in equal shares
    1/m: a client reports its own trace, and a false one could dominate the average."""
    total = traces.sum()
    if not bool(torch.isfinite(total)) or not bool(total > 0):
        return None
    if normalise == "softmax":
        weights = ((traces - traces.max()) / temperature).exp()
    elif normalise == "min-max":
        weights = traces - traces.min()
        weights = weights if bool(weights.sum() > 0) else torch.ones_like(traces)
    else:
        weights = traces
    weights = weights / weights.sum()
    return weights if clip is None else _capped(weights, clip / len(weights))


def _capped(weights: Tensor, cap: float) -> Tensor:
    """None above the cap; what is cut off goes to the others in proportion, or equally where they have
    nothing."""
    full, most, out = torch.zeros_like(weights, dtype=torch.bool), torch.full_like(weights, cap), weights
    while bool((out > cap * (1 + 1e-12)).any()):
        full |= out > cap
        if bool(full.all()):
            return torch.full_like(weights, 1 / len(weights))
        rest = torch.where(full, torch.zeros_like(weights), weights)
        rest = rest if bool(rest.sum() > 0) else (~full).to(weights.dtype)
        out = torch.where(full, most, rest / rest.sum() * (1 - cap * int(full.sum())))
    return out


@register(
    "method",
    "fedas",
    paper="Yang, Huang, Ye, FedAS: Bridging Inconsistency in Personalized Federated Learning, CVPR 2024",
)
class FedAS(Method):
    """A shared backbone under private heads, aligned to each client's own features and averaged by the trace
    of the Fisher information.

    `variant = "authors"` is what the released code does: alignment as a chain through the cohort, also of
    clients that have not trained yet (towards the features of the random start), to class means that leave
    out the last incomplete batch, in evaluation mode."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "backbone, and up the trace of the Fisher information",
        "what a client keeps": "its model",
        "personal model": "the model that it keeps",
        "what that says, beyond the update itself": (
            'backbone, with `align = "serial"` twice in a round; `fim` is a Fisher trace, one '
            "number: how sharply the data pulls"
        ),
    }
    Client = FedASClient
    Server = FedASServer
    tables = {
        "fim": RecordedTable(
            "trace of the Fisher information (t-FIM) that each client reported",
            title="Trace of the Fisher information",
        ),
        "alpha": RecordedTable(
            "weight of each client by its t-FIM, before the aggregation rule",
            title="Weight by Fisher information",
            share=True,
        ),
    }
    models = ("personal",)
    deploys = "personal"
    presets = {
        "authors": {
            "align": "serial",
            "first": "literal",
            "align_means": "whole-batches",
            "align_mode": "evaluation",
        }
    }
    search = {"align_lr": (0.001, 0.01, 0.1)}  # the paper searches nothing; around the released code's

    variant: Literal["paper", "authors"] = setting(
        "paper", "paper: the defaults; authors: a chain of alignments, from the first time on"
    )
    align: Literal["parallel", "serial", "joint", "off"] = setting(
        "parallel",
        "before training, each client for itself; each from what the one before left (serial); as a term of"
        " training (joint)",
    )
    align_target: Literal["prototype", "sample"] = setting(
        "prototype", "pull features to class means (code) or each to its own (paper)"
    )
    align_means: Literal["all", "whole-batches"] = setting(
        "all",
        "class means over all samples (paper), or without the last incomplete batch of align_batch_size, in"
        " the data's order (code)",
    )
    align_to: Literal["own", "global"] = setting(
        "own", "source of the features: the client's last backbone, or the received one (Fig. 4b)"
    )
    align_loss: Literal["mean", "sum"] = setting(
        "mean", "squared distance per feature and sample, or Eq. 4's sum over both"
    )
    align_lr: float = setting(0.01, "learning rate of alignment", ge=0)
    align_epochs: int = setting(1, "epochs of alignment", ge=0)
    align_batch_size: int = setting(16, "batch size of alignment", ge=1)
    align_mode: Literal["training", "evaluation"] = setting(
        "training",
        "BatchNorm and Dropout while aligning: by batches, or as in evaluation, which shifts no statistics"
        " (code; not in joint)",
    )
    align_statistics: bool = setting(
        False, "let alignment in training mode shift the running statistics of BatchNorm"
    )
    first: Literal["skip", "literal", "received"] = setting(
        "skip",
        "a client's first time: no alignment, towards its random start, or towards the received model's"
        " features",
    )
    synchronise: bool = setting(
        True, "weight clients by the trace of the Fisher information; else by samples"
    )
    fim: Definition = setting(
        "batch-sum",
        "gradients that are squared: those of batches (summed or averaged), samples, all at once (full:"
        " of the sum;"
        " full-mean)",
    )
    normalise: Literal["proportional", "softmax", "min-max"] = setting(
        "proportional", "how traces become weights (Fig. 6a)"
    )
    temperature: float = setting(1.0, "what softmax divides the traces by", gt=0)
    clip: float | None = setting(
        None, "largest weight of a client, in equal shares 1/m: 3.0 is three times an equal share", ge=1
    )
    extra_1_over_m: bool = setting(False, "divide the step by the number of clients, as Eq. 8 prints it")
    decoupling: Literal["head", "channels"] = setting(
        "head", "what is private: the head, or a share of every layer's channels (Fig. 6b)"
    )
    rho: float = setting(
        0.5, "private share of the output channels, where channels are split", static=True, ge=0, le=1
    )
