"""Building an experiment's objects from its config: the network, the samples, and what an engine needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks.adversary import Adversary
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.data.federation import Federation, Samples, load_samples
from holdfast.engine.run_context import Measure, RunContext
from holdfast.experiment.config import Config, Parts
from holdfast.experiment.object_names import words
from holdfast.local.fit import Recipe
from holdfast.local.function_identity import described, name_of
from holdfast.methods.base import ClientRule
from holdfast.models.auto import Auto
from holdfast.models.base import architecture, check_reads
from holdfast.models.calling import adapt
from holdfast.models.fit_check import Fit, check_fits
from holdfast.models.network import Network
from holdfast.models.own_module import Model, find_head, with_head
from holdfast.models.weights import Weights
from holdfast.privacy.protection import Protection
from holdfast.privacy.settings import PrivacySettings
from holdfast.storage.client_state import RowStore


def make_run_context(
    config: Config,
    parts: Parts,
    label: str,
    out: Path,
    key: Key,
    rule: ClientRule,
    network: Network,
    initial: Tensor,
    federation: Federation,
    adversary: Adversary,
) -> RunContext:
    """The experiment as an engine sees it, with poisoned data where an attack poisons it."""
    train, evaluate = config.train, config.evaluate
    recipe = Recipe(
        lr=train.lr,
        epochs=train.local_epochs,
        steps=train.local_steps,
        batch_size=train.batch_size,
        momentum=train.momentum,
        weight_decay=train.weight_decay,
        shuffle=train.shuffle,
        drop_last=train.drop_last,
        augment=train.augment,
        loss=parts.loss,
        optimizer=parts.optimizer,
        clip_gradient=train.clip_gradient,
        **_dp_sgd(config.privacy),
    )
    poisoned = adversary.poison_data(federation, "test" if evaluate.test == "per-client" else "global_test")
    measure = Measure(
        models=measured_models(config, parts),
        test=evaluate.test,
        unselected=evaluate.unselected,
        validation=config.data.split.validation > 0,
        metrics=measured_metrics(config),
        trigger=adversary.triggered is not None,
        of_target=adversary.triggered is not None and adversary.triggered.of_target is not None,
        selected=evaluate.selected,
        moving=""
        if adversary.attack is None or adversary.moving is None
        else str(adversary.attack.structure()),
    )
    return RunContext(
        label=label,
        key=key,
        method=parts.method,
        rule=rule,
        network=network,
        initial=initial,
        federation=poisoned,
        recipe=recipe,
        lr_decay=train.lr_decay,
        measure=measure,
        rows=RowStore(out / "rows"),
        adversary=adversary,
        norm_cap=train.norm_cap,
        schedule=parts.schedule,
        rounds=train.rounds,
        privacy=None if config.privacy is None else Protection(config.privacy),
    )


def check_global_test(config: Config, federation: Federation) -> None:
    """Refuse a common test set where the data has none."""
    if config.evaluate.test == "global" and len(federation.samples) and not len(federation.global_test.row):
        raise ConfigError(
            'evaluate.test = "global": the data has no test set; give one, or leave it out to test every'
            " client on samples of its own"
        )


def _dp_sgd(privacy: PrivacySettings | None) -> dict[str, Any]:
    """What DP-SGD adds to a recipe."""
    if privacy is None or not privacy.of_samples:
        return {}
    return {"sample_clip": privacy.clip, "sample_noise": privacy.noise * privacy.clip}


def measured_models(config: Config, parts: Parts) -> tuple[str, ...]:
    """The models to evaluate: those of the method that the config asks for."""
    return tuple(model for model in parts.method.models if model in config.evaluate.models)


def measured_metrics(config: Config) -> tuple[str, ...]:
    """What is measured beside accuracy and loss, each once."""
    return tuple(dict.fromkeys(config.evaluate.metrics))


def with_named_model(config: Config, parts: Parts, samples: Samples) -> tuple[Config, Parts]:
    """The config and its parts with the network that `auto` means for these samples."""
    if not isinstance(parts.model, Auto):
        return config, parts
    chosen = parts.model.chosen(samples.sample_shape, samples.words)
    named = {"model": build("model", chosen)}
    return config.model_copy(update={"model": chosen}), parts.model_copy(update=named)


def make_network(parts: Parts, samples: Samples, dtype: str, weights: Weights | None = None) -> Network:
    """The method's network around the chosen model. Where its start weights come from is not part of its
    signature."""
    rule, model = parts.method.client_half(), parts.model
    built_by = name_of(type(rule).network)
    if type(rule).network is not ClientRule.network:  # which may read settings
        built_by += f" {described(parts.method.settings())}"
    make, head, about = _builder(model, samples)
    kind = torch.float64 if dtype == "float64" else torch.float32
    own = isinstance(model, Model) or not type(model).__module__.startswith("holdfast.")
    # the first module is checked, and is then the template: a factory is not called more often than needed
    ready, fit = [make()], Fit(adapt=False, draws=False)
    if own:
        name = words(model.source if isinstance(model, Model) else model)
        with_head(ready[0], head)
        fit = check_fits(ready[0], name, _two(samples, kind), samples.classes, samples.name)
        if isinstance(model, Model) and model.finds_head:
            head = find_head(ready[0], samples.classes, name)
    rule.head_name = head

    def fresh(begin: Callable[[nn.Module], nn.Module] | None = None) -> nn.Module:
        module = ready.pop() if ready and begin is None else make()
        module = with_head(module, head) if begin is None else begin(module.to(kind))
        return rule.network(adapt(module) if fit.adapt else module)

    begin = None if weights is None else partial(fresh, weights.into)
    network = Network(fresh, head and rule.head(head), f"{about} {built_by}", kind, begin)
    network.draws |= fit.draws
    return network


def _builder(model: Any, samples: Samples) -> tuple[Callable[[], nn.Module], str | None, str]:
    """What builds the user's or the registered network, the name of its head, and a description of both."""
    shape, classes = samples.sample_shape, samples.classes
    if isinstance(model, Model):
        about = f"model {model.serial}"
        if model.takes_data:
            return partial(model.make, shape, classes), model.head, f"{about} {shape} {classes}"
        return model.make, model.head, about
    if hasattr(model, "build"):
        check_reads(model, shape, samples.words)
        about = f"{name_of(type(model))} {described(architecture(model))} {shape} {classes}"
        return partial(model.build, shape, classes), "head", about
    raise ConfigError(f"model '{model.name}' cannot be built")


def _two(samples: Samples, kind: torch.dtype) -> Tensor:
    """Two samples to try a module on, or blank ones where there are none. Of texts one holds the largest
    token, for which the module needs an entry in its table."""
    if not len(samples):
        return torch.stack([samples.blank(kind)] * 2).cpu()
    second = int(samples.x.flatten(1).amax(1).argmax()) if samples.words else 1 % len(samples)
    return samples.batch(torch.tensor([0, second], device=samples.x.device), kind).cpu()


def shared_samples(configs: list[Config]) -> list[Samples]:
    """One sample store for all experiments that use the same data, so that they can be fused."""
    loaded: dict[str, Samples] = {}
    out = []
    for config in configs:
        name = sample_key(config)
        if name not in loaded:
            loaded[name] = load_samples(config.data)
        out.append(loaded[name])
    return out


def sample_key(config: Config) -> str:
    """Configs with equal keys use the same samples."""
    return repr((config.data.name, config.data.options, config.data.dir))
