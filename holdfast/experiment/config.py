"""The typed config: the same fields in TOML, in Python and behind --set. Every mistake is an error here,
before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from holdfast.aggregators.base import Aggregator
from holdfast.attacks.base import Attack
from holdfast.core.device import Precision
from holdfast.core.errors import ConfigError
from holdfast.core.memory import parse_bytes
from holdfast.core.registry import INVALID, Part, build, current, explain, setting
from holdfast.core.screening import FEDERATION_NORM_CAP
from holdfast.data.federation import DataSettings
from holdfast.detectors.base import Detector
from holdfast.evaluation.scores import Metric
from holdfast.experiment.given_again import refuse_words
from holdfast.experiment.object_names import Numbers, plain
from holdfast.experiment.participation import cohort_size
from holdfast.experiment.update_parts import chosen_optimizer, chosen_schedule, named_optimizer
from holdfast.local.augment import Augment
from holdfast.local.optimizers.base import Optimizer
from holdfast.local.schedules import Schedule
from holdfast.methods.base import Method
from holdfast.models.own_module import Model, is_bare
from holdfast.privacy.settings import PrivacySettings
from holdfast.server_optimizers.base import ServerOptimizer

Chosen = Any
"""A part by name, by a table with a name, or the object itself."""

Availability = float | str | dict[str, list[tuple[int, int]]]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)


class TrainSettings(Section):
    """The [train] section."""

    rounds: int = setting(50, "communication rounds", ge=1)
    local_epochs: int = setting(5, "epochs of each client in each round", ge=0)
    local_steps: int | None = setting(None, "mini-batch steps of each client, instead of epochs", ge=0)
    batch_size: int = setting(10, "samples per step", ge=1, le=10**9)
    lr: float = setting(0.01, "learning rate of the clients", gt=0)
    lr_decay: float = setting(1.0, "the learning rate is multiplied by this after every round", gt=0, le=1)
    momentum: float = setting(0.0, "momentum of the clients' optimiser (sgd, rmsprop)", ge=0, lt=1)
    weight_decay: float = setting(
        0.0, "weight decay of the clients' optimiser, added to the gradient (sgd, adam, rmsprop)", ge=0
    )
    clip_gradient: float | None = setting(
        None, "shorten each client's gradient, in every step, to this norm where it is longer", gt=0
    )
    participation: float = setting(
        1.0, "share of all clients that is drawn in each round, from those that are available", gt=0, le=1
    )
    availability: Availability = setting(
        1.0,
        "which clients are available: a probability, {client = [[from, to], ...]} in rounds, or a JSON file",
    )
    dropout: float = setting(0.0, "probability that a drawn client's reply is lost", ge=0, le=1)
    server_lr: float = setting(
        1.0, "the server moves this far along the aggregate, where `server` is none", gt=0
    )
    shuffle: bool = setting(True, "draw a new order of samples in every epoch")
    drop_last: bool = setting(False, "skip the last incomplete batch of an epoch")
    loss: Chosen = setting("cross-entropy", "a loss by name, or a function of one client's batch")
    augment: Augment = Augment()
    norm_cap: float | None = setting(
        None,
        f"refuse updates with a norm above this; none: {FEDERATION_NORM_CAP:g} in federations, no cap in"
        " simulations",
        gt=0,
    )
    dtype: Literal["float32", "float64"] = setting(
        "float32", "floating-point type of the model; float64 for exact comparisons"
    )


class EvaluateSettings(Section):
    """The [evaluate] section: one protocol for all methods, written into every result."""

    every: int = setting(1, "evaluate after every so many rounds; the last round always is", ge=1)
    clients: Literal["all", "benign", "cohort", "held-out"] = setting(
        "all", "evaluate on all clients, the benign ones, the round's cohort, or those held out of training"
    )
    models: tuple[Literal["global", "customised", "personal"], ...] = setting(
        ("global", "customised", "personal"), "evaluate these models, where the method has them"
    )
    unselected: Literal["keep_own", "deliver", "finetune"] = setting(
        "keep_own",
        "evaluate a client outside the cohort with its own model (keep_own), with what it would be sent"
        " now (deliver), or with a copy trained from that (finetune)",
    )
    selected: Literal["deliver", "keep_own"] = setting(
        "deliver",
        "evaluate a client in the cohort with what it would be sent now (deliver), or with its model as its"
        " training left it (keep_own)",
    )
    test: Literal["per-client", "global"] = setting(
        "per-client", "each client's own test samples, or the dataset's test split"
    )
    metrics: tuple[Metric, ...] = setting((), "metrics to measure beside accuracy and loss")
    targets: tuple[Annotated[float, Field(ge=0, le=1)], ...] = setting(
        (0.8,), "accuracies for rounds_to/..., in [0, 1]"
    )


class EngineSettings(Section):
    """The [engine] section: where and how, never what."""

    plan: Literal[
        "auto", "loop", "vmap", "captured-loop", "captured-vmap", "compiled-loop", "compiled-vmap"
    ] = setting(
        "auto",
        "clients one by one or stacked; on cuda also captured or compiled; auto: the one that a short trial"
        " finds faster",
    )
    precision: Precision = setting(
        "tf32",
        "precision of matrix products of float32 models; tf32 means fp32 on a CPU; bf16-activations: what"
        " layers hand to each other is bfloat16 too, while weights, statistics and losses stay float32",
    )
    device: str = setting("cpu", "cpu, cuda or cuda:1")
    memory: str = setting(
        "auto",
        "bound on a stack of training clients, as 2GB; auto: 2GB on a CPU, of what is free on a GPU four"
        " fifths, or three where servers compute on it too",
    )
    server: Literal["auto", "host", "device"] = setting(
        "auto",
        "where servers, attacks and screening compute: on the host, or on the GPU that trains; auto: on the"
        " GPU, where what all clients send fits",
    )
    threads: int | None = setting(
        None, "threads; default: 1, or PyTorch's own number where that is clearly faster", ge=1, le=4096
    )
    workers: int | None = setting(
        None,
        "processes that train side by side; default: as many as cores, where clearly faster",
        ge=1,
        le=1024,
    )

    @field_validator("memory")
    @classmethod
    def _amount(cls, text: str) -> str:
        if text != "auto":
            parse_memory(text)
        return text


class Config(Section):
    """A whole experiment."""

    seed: int = setting(0, "random seed of data, model, cohorts and batches")
    data: DataSettings = DataSettings()
    model: Chosen = setting(
        "auto", "`holdfast list models`, or a module of your own; auto: a network by the kind of the samples"
    )
    method: Chosen = setting("fedcap", "`holdfast list methods`")
    aggregator: Chosen = setting(None, "`holdfast list aggregators`, with wrappers in `wrap`; none: the mean")
    detectors: tuple[Chosen, ...] = setting((), "`holdfast list detectors`")
    server: Chosen = setting(
        None, "`holdfast list servers`; none (also as a name): the server adds train.server_lr * aggregate"
    )
    attack: Chosen = setting(None, "`holdfast list attacks`; none (also as a name): every client is honest")
    optimizer: Chosen = setting(
        "sgd", '`holdfast list optimizers`, or any class of torch.optim that can be stacked, as "torch:NAdam"'
    )
    schedule: Chosen = setting(
        None,
        "`holdfast list schedules`, or a function of the round (and step); none (also as a name): no change",
    )
    train: TrainSettings = TrainSettings()
    privacy: PrivacySettings | None = setting(
        None, "clip and noise what clients send; none (also as a name): it is sent unchanged"
    )
    evaluate: EvaluateSettings = EvaluateSettings()
    engine: EngineSettings = EngineSettings()
    _numbers: Numbers = PrivateAttr(default_factory=dict)
    """Numbers of the objects that share a name with others of the sweep."""

    @field_validator("attack", "server", "schedule", "privacy", mode="before")
    @classmethod
    def _none(cls, part: Any) -> Any:
        """Accept the name "none" for no attack, no server optimiser, no schedule and no [privacy]: TOML has
        no null, and a sweep over them needs a cell without one."""
        return None if (part.get("name") if isinstance(part, Mapping) else part) == "none" else part

    @field_validator("optimizer", mode="before")
    @classmethod
    def _by_name(cls, optimizer: Any) -> Any:
        """Spell classes of torch.optim by their names, so that another process finds them."""
        return named_optimizer(optimizer)

    @field_validator("detectors", mode="before")
    @classmethod
    def _several(cls, detectors: Any) -> Any:
        if not isinstance(detectors, (list, tuple)):
            raise ValueError('needs a list: detectors = ["norm"], or [[detectors]] above a table of settings')
        return detectors

    @model_validator(mode="before")
    @classmethod
    def _current(cls, given: Any) -> Any:
        return with_current_parts(given) if isinstance(given, Mapping) else given

    def parts(self) -> Parts:
        return Parts.of(self)

    def plain(self) -> dict[str, Any]:
        """The config as a manifest holds it. Objects are named; a run with unnamed objects cannot be resumed
        by name alone."""
        return plain(self, self._numbers)

    def numbered(self, numbers: Numbers) -> Config:
        self._numbers = numbers
        return self


def with_current_parts(table: Mapping[str, Any]) -> dict[str, Any]:
    """A config's table with its parts as this version spells them."""
    out = dict(table)
    for kind in ("method", "aggregator", "server", "attack"):
        if kind in out:
            out[kind] = current(kind, out[kind])
    if isinstance(out.get("detectors"), (list, tuple)):
        out["detectors"] = [current("detector", one) for one in out["detectors"]]
    rule = out.get("aggregator")
    if isinstance(rule, Mapping) and isinstance(rule.get("wrap"), (list, tuple)):
        out["aggregator"] = {**rule, "wrap": [current("wrapper", one) for one in rule["wrap"]]}
    return out


def completed(began: Mapping[str, Any]) -> dict[str, Any]:
    """A plain config as this version would write it: settings that are newer than it have their defaults. A
    model that it does not name is mlp, the default of version 0.1."""
    usual = Config().plain()
    return {
        **usual,
        "model": "mlp",
        **with_current_parts(began),
        **{name: {**usual[name], **began.get(name, {})} for name in ("data", "train", "evaluate", "engine")},
    }


class Parts(Section):
    """The config's parts as objects, checked against each other."""

    method: Method
    model: Any
    aggregator: Aggregator
    detectors: tuple[Detector, ...]
    server: ServerOptimizer | None
    attack: Attack | None
    loss: Any
    optimizer: Optimizer
    schedule: Schedule | None

    @classmethod
    def of(cls, config: Config) -> Parts:
        method: Method = build("method", config.method)
        if not isinstance(method, Method):
            raise ConfigError(f"method: {type(method).__name__} is not a method")
        aggregator = _aggregator(config.aggregator)
        if config.aggregator is not None and not method.reduces:
            raise ConfigError(
                f"aggregator: method '{method.name}' does not aggregate updates, so an aggregator has no"
                f" effect; remove '{aggregator.name}'"
            )
        if config.detectors and not method.reduces:
            raise ConfigError(
                f"detectors: method '{method.name}' does not aggregate updates, so detectors have no effect;"
                " remove them"
            )
        if "root" in aggregator.needs and config.data.root < 1:
            raise ConfigError(
                f"aggregator '{aggregator.name}' needs the server's own data; set data.root, for example"
                " to 100"
            )
        if aggregator.idle():
            raise ConfigError(
                f"'{aggregator.name}' needs f, the share (or number) of clients that are assumed malicious;"
                " set aggregator.f, for example 0.2"
            )
        known = config.data.known_clients
        if known is not None:
            _check_trusted(aggregator, known)
            check_cohort(aggregator, cohort_size(config.train.participation, known - config.data.held_out))
        if "validation" in method.Client.needs and config.data.split.validation <= 0:
            raise ConfigError(
                f"method '{method.name}' needs validation data; set data.split.validation, for example to 0.1"
            )
        if config.evaluate.clients == "held-out" and config.data.held_out < 1:
            raise ConfigError('evaluate.clients = "held-out" needs held-out clients; set data.held_out')
        if config.evaluate.test == "global" and config.data.pool != "train":
            raise ConfigError('evaluate.test = "global" would test on training data; set data.pool = "train"')
        if not set(config.evaluate.models) & set(method.models):
            raise ConfigError(f"evaluate.models: method '{method.name}' has only {', '.join(method.models)}")
        if not callable(config.train.loss) or isinstance(config.train.loss, Part):
            loss = build("loss", config.train.loss, "train.loss")
        else:
            loss = config.train.loss
        found = dict(
            method=method,
            model=_model(config.model),
            aggregator=aggregator,
            detectors=tuple(build("detector", d, f"detectors.{i}") for i, d in enumerate(config.detectors)),
            server=_server(config, method),
            attack=None if config.attack is None else build("attack", config.attack),
            loss=loss,
            optimizer=chosen_optimizer(config.optimizer, config.train, method),
            schedule=chosen_schedule(config.schedule),
        )
        try:
            return cls(**found)
        except INVALID as error:  # an object of the wrong kind
            raise ConfigError(explain(error, cls, "")) from None


def _model(chosen: Chosen) -> Any:
    """A registered network, or a module of the user's own."""
    if isinstance(chosen, Model):
        return chosen
    return Model.around(chosen) if is_bare(chosen) else build("model", chosen)


def check_cohort(aggregator: Aggregator, n: int) -> None:
    """Refuse a rule for which a full cohort of n is too small: it would fall back in every round."""
    if not aggregator.enough(n):
        f = aggregator.assumed(n)
        raise ConfigError(
            f"aggregator '{aggregator.name}' needs {aggregator.condition}, but a cohort has n = {n} clients"
            f" with f = {f}; lower aggregator.f, or raise data.clients or train.participation"
        )


def _check_trusted(aggregator: Aggregator, clients: int) -> None:
    trusted = aggregator.trusts()
    if trusted is not None and trusted >= clients:
        raise ConfigError(f"aggregator.trusted: the clients are 0 to {clients - 1}, got {trusted}")


def _aggregator(chosen: Chosen) -> Aggregator:
    """An aggregator with its wrappers: `wrap` lists them from the inside out."""
    if chosen is None:
        chosen = "mean"
    if not isinstance(chosen, Mapping):
        return build("aggregator", chosen)
    table = dict(chosen)
    wrappers = table.pop("wrap", [])
    if not isinstance(wrappers, (list, tuple)):
        raise ConfigError(f"aggregator.wrap: needs a list of wrappers, from the inside out, not {wrappers!r}")
    rule: Aggregator = build("aggregator", table)
    for i, wrapper in enumerate(wrappers):
        rule = build("wrapper", wrapper, f"aggregator.wrap.{i}")(rule)
    return rule


def _server(config: Config, method: Method) -> ServerOptimizer | None:
    """The server's optimiser, where the method has a model that it can move."""
    if config.server is None:
        return None
    chosen: ServerOptimizer = build("server", config.server)
    if why := method.without_server_optimizer():
        or_remove = ", or remove" if ";" in why else "; remove"
        raise ConfigError(f"server: method '{method.name}' {why}{or_remove} '{chosen.name}'")
    if config.train.server_lr != 1.0:
        raise ConfigError(
            f"train.server_lr: '{chosen.name}' has a learning rate of its own; set server.lr, and leave"
            f" train.server_lr at 1 (got {config.train.server_lr:g})"
        )
    return chosen


def make_config(table: Mapping[str, Any]) -> Config:
    """A config from plain tables; the first mistake is a one-line error that names the key."""
    refuse_words(table)
    try:
        return Config(**table)
    except INVALID as error:
        raise ConfigError(explain(error, Config, "")) from None


def parse_memory(text: str) -> int:
    """Convert '2GB', '500 MB' or '1.5GiB' to bytes."""
    return parse_bytes(text, "engine.memory")
