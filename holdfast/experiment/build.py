"""Building an experiment's objects from its config: the network, the samples, and what an engine needs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from holdfast.attacks.adversary import Adversary
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.data.federation import Federation, Samples, load_samples
from holdfast.engine.run_context import Measure, RunContext
from holdfast.experiment.config import Config, Parts
from holdfast.experiment.object_names import words
from holdfast.local.fit import Recipe
from holdfast.local.function_identity import described, name_of
from holdfast.methods.base import ClientRule
from holdfast.models.base import architecture, check_reads
from holdfast.models.network import Model, Network, check_fits, with_head
from holdfast.models.weights import Weights
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
    )
    poisoned = adversary.poison_data(federation, "test" if evaluate.test == "per-client" else "global_test")
    measure = Measure(
        models=measured_models(config, parts),
        test=evaluate.test,
        unselected=evaluate.unselected,
        validation=config.data.split.validation > 0,
        metrics=measured_metrics(config),
        trigger=adversary.triggered is not None,
        selected=evaluate.selected,
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
    )


def measured_models(config: Config, parts: Parts) -> tuple[str, ...]:
    """The models to evaluate: those of the method that the config asks for."""
    return tuple(model for model in parts.method.models if model in config.evaluate.models)


def measured_metrics(config: Config) -> tuple[str, ...]:
    """What is measured beside accuracy and loss, each once."""
    return tuple(dict.fromkeys(config.evaluate.metrics))


def make_network(parts: Parts, samples: Samples, dtype: str, weights: Weights | None = None) -> Network:
    """The method's network around the chosen model. Where its start weights come from is not part of its
    signature."""
    rule, model = parts.method.client_half(), parts.model
    built_by = name_of(type(rule).network)
    if type(rule).network is not ClientRule.network:  # which may read settings
        built_by += f" {described(parts.method.settings())}"
    if isinstance(model, Model):
        make, head, about = model.make, model.head, f"model {model.serial}"
    elif hasattr(model, "build"):
        check_reads(model, samples.sample_shape, samples.words)
        make, head = partial(model.build, samples.sample_shape, samples.classes), "head"
        about = (
            f"{name_of(type(model))} {described(architecture(model))} {samples.sample_shape}"
            f" {samples.classes}"
        )
    else:
        raise ConfigError(f"model '{model.name}' cannot be built")
    rule.head_name = head
    kind = torch.float64 if dtype == "float64" else torch.float32
    checked = not isinstance(model, Model) and type(model).__module__.startswith("holdfast.")

    def fresh() -> nn.Module:
        nonlocal checked
        module = with_head(make(), head)
        if not checked:  # only the first module is checked, so that a factory is not called more often
            name = words(model.source if isinstance(model, Model) else model)
            check_fits(module, name, samples.blank(kind).cpu(), samples.classes, samples.name)
            checked = True
        return rule.network(module)

    begin = None if weights is None else lambda: rule.network(weights.into(make().to(kind)))
    return Network(fresh, head and rule.head(head), f"{about} {built_by}", kind, begin)


def shared_samples(configs: list[Config]) -> list[Samples]:
    """One sample store for all experiments that use the same data, so that they can be fused."""
    loaded: dict[str, Samples] = {}
    out = []
    for config in configs:
        name = repr((config.data.name, config.data.options, config.data.dir))
        if name not in loaded:
            loaded[name] = load_samples(config.data)
        out.append(loaded[name])
    return out
