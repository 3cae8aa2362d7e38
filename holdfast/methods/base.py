"""The base classes of methods: a client half and a server half that do not know where they run, and what the
method deploys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

from holdfast.core.columns import Reads
from holdfast.core.flat import Wire
from holdfast.core.registry import Part, declared
from holdfast.core.types import Exchange, Field, Round, Schema, State, Steps, Verdict, broadcast
from holdfast.detectors.base import Detector
from holdfast.evaluation.metrics import Figures
from holdfast.local.client import Local, Received
from holdfast.local.function_identity import identity
from holdfast.methods.client_view import ClientView
from holdfast.methods.context import Context
from holdfast.models.network import Network

Fields = Mapping[str, Tensor]
MOST_SAMPLES = 1e9  # that a client may report: the float32 sum of any cohort stays finite


class ClientRule:
    """The client half. Tensors carry a leading client axis n; on a real client n = 1. Private state is a flat
    dict of [n, ...] tensors."""

    tasks: ClassVar[frozenset[str]] = frozenset({"train"})
    """The tasks that its server half may request: names of its methods."""
    quiet: ClassVar[frozenset[str]] = frozenset()
    """Tasks that leave a client's models as they were: a client that did nothing else in a round did not take
    part in it."""
    optional: ClassVar[frozenset[str]] = frozenset()
    """Tasks for whose missing replies a federation does not wait."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """What it requires, for example {"validation"}."""
    knows: ClassVar[frozenset[str]] = frozenset()
    """Facts about a client's data that the partition states and that the client itself may read in
    `local.facts`, for example {"target"}."""
    models_per_client: ClassVar[int] = 1
    """How many models a client trains in one task: for the forecast of time and memory."""
    only_fit: ClassVar[bool] = False
    """Whether all that it learns from a client's samples it learns by `local.fit`, without a step of its own:
    then DP-SGD protects what it sends. Counted only where the class itself declares it."""
    refuses: ClassVar[Mapping[str, str]] = {}
    """Settings of local training that it cannot follow, each with the reason: `optimizer` (any but sgd),
    `optimizer.persist`, `train.clip_gradient`."""
    head_name: str | None = None
    """What the model calls its head; known before `network` is asked for."""

    def __init__(self, method: Method):
        self.method = method

    def trainings(self) -> Mapping[str, int]:
        """Its trainings, by task and purpose, with the models that each has for a client: for each of them a
        client keeps an optimiser's state between rounds, where `optimizer.persist` is set. 0: it always
        starts afresh."""
        return {"train/fit": 1}

    def network(self, module: nn.Module) -> nn.Module:
        """The network that is trained: the model itself, or one built around it."""
        return module

    def head(self, name: str) -> str:
        """What the model's head is called in that network."""
        return name

    def unwrapped(self, network: nn.Module) -> nn.Module:
        """The model that users get from such a network: where it was built around a model, that model."""
        return network

    def predict(self, net: nn.Module, x: Tensor, aux: Mapping[str, Tensor]) -> Tensor:
        """Logits of one client."""
        return net(x)

    def aux(self, local: Local, state: State, received: Received) -> Mapping[str, Tensor]:
        """Per-client tensors that `predict` needs."""
        return {}

    def shared(self, network: Network, round: int) -> Tensor:
        """bool[size]: which entries of the model travel."""
        return torch.ones(network.layout.size, dtype=torch.bool)

    def init(self, local: Local) -> State:
        """Private state of clients that are seen for the first time."""
        return {}

    def schema(self, task: str, wire: Wire) -> Schema:
        """What the reply to a task looks like."""
        return {
            "update": Field("update", (wire.parameters,)),
            "buffers": Field("buffer", (wire.buffers,)),
            "count": Field("count", (), low=0, high=MOST_SAMPLES),
            "loss": Field("scalar"),
        }

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        raise TypeError(f"{type(self).__name__} has no task 'train'")

    def finetune(self, local: Local, state: State, received: Received) -> State:
        """The state of clients outside the cohort if they had trained from what they would be sent: for
        evaluation only."""
        return self.train(local, state, received, {})[0]

    def committee_model(self, local: Local, state: State, received: Received) -> Tensor:
        """The models [n, size] with which these clients, as members of a committee, test what another client
        sent; where only a part of a model travels, the rest is the common start model's."""
        return received.into(local.initial)

    begins_unsent: ClassVar[bool] = False
    """Whether a client that is sent no model of its own still trains, from one that it keeps: `as_sent` says
    which."""

    def as_sent(self, local: Local, state: State, received: Received) -> tuple[Tensor, Tensor]:
        """The whole models [n, size] with which these clients begin to train, and the models as they travel
        from which the server counts their updates: for attackers that train in their own way."""
        return self.committee_model(local, state, received), received.model

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        """The models [n, size] these clients would use for themselves; `received.has` is false where a client
        keeps what it had."""
        return received.into(local.initial)

    def handed(self, local: Local, own: Tensor, received: Received) -> Tensor:
        """These models after clients outside the cohort received the newest model before evaluation."""
        return received.into(own)


class FinishedRun(Protocol):
    """What a method's own results may use of a run on disk."""

    path: Path

    def server_state(self) -> State:
        """The server's state after the last committed round."""

    def module(self, model: Tensor) -> nn.Module:
        """A model as it travels, as a module."""

    def parameters_of(self, change: Tensor | Mapping[str, Tensor], where: str) -> Tensor:
        """A change of a model as one vector of its parameters; errors begin with `where`."""

    def new_client_id(self) -> int:
        """The number of a client that would join now."""

    def delivered(self, client: int, reply: Callable[[Schema], Fields], where: str) -> Exchange:
        """What the server would send this client now; `reply` makes its answer to what it is asked first."""


class ServerRule:
    """The server half: state and uplinks in, state and verdict out. A round is a generator that yields
    Exchanges and is sent Uplinks."""

    reads: ClassVar[Reads] = "rows"
    """How it reads the updates where several processes share them (core/columns.py). "columns": it hands them
    to `ctx.judge` and `ctx.merge` and looks at no update itself, so each process has columns of all of them.
    "rows": each process gathers whole updates."""

    def __init__(self, method: Method):
        self.method = method

    def init(self, ctx: Context) -> State:
        return {"model": ctx.initial}

    def round(self, state: State, ctx: Context) -> Round:
        raise TypeError(f"{type(self).__name__} does not define a round")

    def deliver(self, state: State, ctx: Context, ids: Tensor) -> Steps[Exchange]:
        """What these clients would receive now: for evaluation, export and late joiners."""
        yield from ()
        return broadcast("deliver", state["model"], ids)

    def finish(self, state: State, ctx: Context) -> Steps[State]:
        """After the last round: nothing, unless the method tunes something at the end."""
        yield from ()
        return state

    def global_model(self, state: State) -> Tensor | None:
        """The one model of the federation, as it travels, where there is one."""
        return state.get("model")


class Method(Part):
    """A published method: its settings are fields, its halves are classes."""

    Client: ClassVar[type[ClientRule]]
    Server: ClassVar[type[ServerRule]]
    models: ClassVar[tuple[str, ...]] = ("global",)
    """Which of global, customised and personal it has."""
    deploys: ClassVar[str] = "global"
    """The model its users would run: the headline accuracy."""
    reduces: ClassVar[bool] = True
    """Whether it ever aggregates updates: if not, choosing an aggregator is an error."""

    results: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    """What a run of this method can give beyond the common results, by name: each function gets the
    `FinishedRun` first, and `run.name(...)` calls it."""

    @property
    def draws_banned(self) -> bool:
        """Whether clients that its server half banned are still drawn, and the server half ignores them."""
        return False

    def without_server_optimizer(self) -> str:
        """Why a server optimiser does not go with it, as words after its name; empty where one does: it then
        acts in `ctx.reduce`, on the vector that this moves."""
        return "" if self.reduces else "does not aggregate updates, so a server optimiser has no effect"

    def detectors(self) -> tuple[Detector, ...]:
        """Its own detectors, which judge before the attached ones."""
        return ()

    def round_figures(self, verdict: Verdict, facts: Mapping[str, Tensor], benign: Tensor) -> Figures:
        """Figures of a round that only this method has, from its verdict. `facts` is what the partition knows
        of the clients, `benign` marks those of `verdict.ids`. They go into the round's metrics and nowhere
        else."""
        return {}

    def row_settings(self) -> dict[str, float]:
        """Settings that may differ between fused experiments, and that a client half finds in
        `local.settings`: the real numbers."""
        return {k: float(v) for k, v in self.settings().items() if self._real(k, v) and not self._declared(k)}

    def static_settings(self) -> dict[str, Any]:
        """Settings that are equal in all experiments of a stack, and that a client half may read from its
        method: all that are neither real numbers, unless declared `static`, nor the server's."""
        own = {k: v for k, v in self.settings().items() if not self._declared(k, "server")}
        return {k: v for k, v in own.items() if not self._real(k, v) or self._declared(k, "static")}

    def structure(self) -> tuple[Any, ...]:
        """Everything that must be equal for two experiments to be fused."""
        return type(self), identity(self.static_settings()), identity(self.__pydantic_private__ or {})

    def _real(self, name: str, value: Any) -> bool:
        """Whether it is a real number; pydantic does not turn a default of 1 into 1.0."""
        return (
            type(value) is float
            or type(value) is int
            and self.__class__.model_fields[name].annotation is float
        )

    def _declared(self, name: str, *words: str) -> bool:
        return any(
            declared(self.__class__.model_fields[name], word) for word in words or ("static", "server")
        )

    def client_half(self) -> ClientRule:
        """Its client half, which sees no setting that may differ between experiments trained together."""
        return self.Client(cast(Method, ClientView(self)))
