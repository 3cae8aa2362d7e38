"""C-PFL. Pan, Guo, Li: C-PFL: A committee-based personalized federated learning framework, Journal of Network
and Computer Applications.

Clients train the backbone under a common head that stays as it was drawn, so that backbones can be averaged
and compared (Algorithm 2). A committee of clients tests every backbone with that head on its own samples and
accepts those that are good enough (Eq. 1 to 4); they are averaged (Eq. 5, Algorithm 1). After the last round
every client tunes the head for itself. Without the committee this is FedBABU.

No code was released. Where the paper contradicts itself, the defaults are what makes sense, and the literal
reading is a switch: docs/c-pfl.md has the list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import StrictBool, field_validator
from torch import Tensor

from holdfast.core.columns import Reads
from holdfast.core.flat import Wire
from holdfast.core.registry import build, register, setting
from holdfast.core.types import UNDEFINED, Field, Round, Schema, State, Steps, Uplink, Verdict
from holdfast.detectors.committee import PAPER, Committee
from holdfast.local.client import Local, Received
from holdfast.methods.base import ClientRule, Fields, Method, ServerRule
from holdfast.methods.context import Context, Merged, memory_of
from holdfast.methods.finetuning import TunedPart, fine_tune, fit_part, tuned_or_newest_model
from holdfast.models.network import Network


class CPflClient(ClientRule):
    """Train the backbone under the common head; store the committee's feedback; in the end tune the head."""

    only_fit = True
    method: CPfl
    tasks: ClassVar[frozenset[str]] = frozenset({"train", "notify", "tune"})
    quiet: ClassVar[frozenset[str]] = frozenset({"notify"})

    def trainings(self) -> Mapping[str, int]:
        return {"train/fit": 1, "tune/fit": 0}  # the tuning starts afresh

    def shared(self, network: Network, round: int) -> Tensor:
        return (
            ~network.head
            if self.method.train == "backbone"
            else torch.ones(network.layout.size, dtype=torch.bool)
        )

    def init(self, local: Local) -> State:
        """`own`: the model it would use by itself. `feedback`: the last score, threshold and decision."""
        nothing, device = local.initial.new_full((local.n, 3), UNDEFINED), local.initial.device
        return {
            "own": local.initial,
            "tuned": torch.zeros(local.n, dtype=torch.bool, device=device),
            "feedback": nothing,
        }

    def schema(self, task: str, wire: Wire) -> Schema:
        if task == "notify" or task == "tune" and not self.method.tune_epochs:
            return {}
        return {"loss": Field("scalar")} if task == "tune" else super().schema(task, wire)

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        start = received.into(local.initial)  # the common head
        fitted = (
            local.fit(start) if self.method.train == "all" else fit_part(local, start, ~local.network.head)
        )
        return {**state, "own": start, "tuned": torch.zeros_like(state["tuned"])}, local.report(
            fitted.model, received, fitted
        )

    def notify(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        return {
            **state,
            "feedback": torch.stack([extra[name] for name in ("accuracy", "threshold", "admitted")], dim=1),
        }, {}

    def tune(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        start, tuned = received.into(local.initial), torch.ones_like(state["tuned"])
        if not self.method.tune_epochs:
            return {**state, "own": start, "tuned": tuned}, {}
        fitted = fine_tune(local, start, self.method.tune, self.method.tune_epochs)
        return {**state, "own": fitted.model, "tuned": tuned}, {"loss": fitted.loss.to(fitted.model.dtype)}

    def finetune(self, local: Local, state: State, received: Received) -> State:
        """Training is for the common body alone; personalisation is the tuning."""
        return self.tune(local, state, received, {})[0]

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return tuned_or_newest_model(local, state, received)


class CPflServer(ServerRule):
    """Train, let the committee judge, average the accepted models, send feedback; in the end, ask for the
    tuning."""

    reads: ClassVar[Reads] = "columns"
    method: CPfl

    def round(self, state: State, ctx: Context) -> Round:
        model, own = state["model"], self.method.detectors()
        up = yield ctx.ask("train", model, self._trainers(state, ctx))
        state, passed, verdict = yield from ctx.judge(state, up, model, own)
        merged = yield from ctx.merge(state, passed, model, verdict)
        merged = self._weighed(merged, ctx, model, up, passed)
        if own and self.method.feedback:
            yield from _feedback(ctx, verdict, passed)
        return merged.state | {"model": merged.model}, merged.verdict

    def _trainers(self, state: State, ctx: Context) -> Tensor:
        """N = M + C: members do not train, unless they are to (Fig. 6)."""
        committee = self.method.committee
        if not isinstance(committee, Committee) or self.method.committee_trains:
            return ctx.cohort
        return ctx.cohort[~torch.isin(ctx.cohort, committee.elect(memory_of(state), ctx))]

    def _weighed(self, merged: Merged, ctx: Context, model: Tensor, up: Uplink, passed: Uplink) -> Merged:
        """Eq. 5 divides by the samples of all, also of clients whose model was rejected; `missing_mass`
        decides what replaces their share."""
        mode, clients = self.method.missing_mass, up.clients()
        if mode == "renormalise" or not len(passed.clients()):
            return merged
        used = float(ctx.priors(clients)[torch.isin(clients.ids, passed.ids)].sum())
        (old, _), (new, buffers) = ctx.wire.split(model), ctx.wire.split(merged.model)
        weighed = old + used * (new - old) if mode == "previous" else used * new
        return replace(merged, model=torch.cat([weighed, buffers]))

    def finish(self, state: State, ctx: Context) -> Steps[State]:
        """Ask also without epochs: a client that did not train last, such as a member, has an older backbone
        and needs the common one."""
        yield ctx.ask("tune", state["model"], ctx.available)
        return state


def _feedback(ctx: Context, verdict: Verdict, passed: Uplink) -> Steps[None]:
    """Send every client whose model was judged its score, the threshold and whether its model was used."""
    kind, score = ctx.initial.dtype, verdict.tables["committee/accuracy"]
    threshold = verdict.tables["committee/threshold"].expand(len(score))
    scored = verdict.tables["committee/ids"]  # a client that was banned for an unusable reply has no score
    used = torch.isin(scored, passed.ids)
    said = {
        "accuracy": score.nan_to_num(nan=UNDEFINED).to(kind),
        "threshold": threshold.to(kind),
        "admitted": used.to(kind),
    }
    if len(scored):
        yield ctx.ask("notify", to=scored, **said)


@register("method", "c-pfl", paper=PAPER)
class CPfl(Method):
    """A common backbone that a committee of clients guards, and a head that every client tunes for itself in
    the end.

    The committee's settings are in a table of their own, [method.committee]: see `holdfast show
    committee`."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "backbone under a head that is never trained; to the committee, all models",
        "what a client keeps": "after the last round: its tuned head",
        "personal model": "newest backbone under that head",
        "what that says, beyond the update itself": (
            "backbone only; committee members send accuracies of others' models on their data"
        ),
    }
    Client = CPflClient
    Server = CPflServer
    models = ("global", "personal")
    deploys = "personal"
    search = {"tune_epochs": (5, 10, 15, 20)}  # Table 6, but for 0, which is no personalisation
    committee: Committee | StrictBool = setting(
        True,
        "the committee's settings as a table; true: its defaults; false: no committee, which is FedBABU",
        validate_default=True,
        server=True,
    )
    committee_trains: bool = setting(False, "whether members train as well (Fig. 6)", server=True)
    train: Literal["backbone", "all"] = setting(
        "backbone", "what is trained together and travels; all: the head too (Fig. 2)"
    )
    tune: TunedPart = setting("head", "what a client tunes for itself after the last round")
    tune_epochs: int = setting(
        10, "epochs of that tuning; 0: none, and every client uses the common model (Table 6)", ge=0
    )
    missing_mass: Literal["renormalise", "previous", "literal"] = setting(
        "renormalise",
        "for the weight of rejected clients in Eq. 5: divide by the others', keep the old model, or nothing,"
        " as printed",
        server=True,
    )
    feedback: bool = setting(
        True, "tell every client that trained its score, the threshold and the decision", server=True
    )

    @field_validator("committee", mode="before")
    @classmethod
    def _table(cls, given: Any) -> Any:
        """Build it by the registry, whose errors are one line."""
        given = {} if given is True else given
        return (
            build("detector", {"name": "committee", **given}, "method.committee")
            if isinstance(given, Mapping)
            else given
        )

    def without_server_optimizer(self) -> str:
        if self.missing_mass == "renormalise":
            return ""
        return (
            f'scales its step afterwards with missing_mass = "{self.missing_mass}"; set it to "renormalise"'
        )

    def detectors(self) -> tuple[Committee, ...]:
        return (self.committee,) if isinstance(self.committee, Committee) else ()
