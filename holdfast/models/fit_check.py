"""Check before a run that a user's module fits the data: it is tried on two samples. An error names the layer
that complained, the shape of a sample, the number of classes, and what to do."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.core.error_origin import in_brackets
from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.models.calling import adapt, is_pretrained_model, logits_in, stackable
from holdfast.models.keyed_draws import HOW_TO_DRAW, KeyedDraws
from holdfast.models.network import prepared

_log = logging.getLogger("holdfast.models")


@dataclass(frozen=True)
class Fit:
    """What trying the module has shown."""

    adapt: bool
    """Whether its answer holds the logits in an object, as in transformers."""
    draws: bool
    """Whether functions inside it draw random numbers or compute attention."""


def check_fits(module: nn.Module, name: str, batch: Tensor, classes: int, data: str) -> Fit:
    """Check that the module reads this batch of two samples and answers with finite numbers, one or more for
    each class. A copy of it is tried, and no random state is changed."""
    about = f"samples of shape {list(batch.shape[1:])} of '{data}' ({classes} classes)"
    tried = stackable(copy.deepcopy(module)).eval()
    tried = tried.to(batch.dtype) if batch.is_floating_point() else tried
    adapts = is_pretrained_model(tried)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        answer, trace = _answer(adapt(tried) if adapts else tried, name, batch, about)
        held = logits_in(answer)
        if held is not None:
            adapts, answer = True, held
        _check_answer(answer, trace, name, batch, classes, data)
        draws = _check_training(prepared(tried), name, batch)
    return Fit(adapts, draws)


@dataclass
class _Trace:
    """Follows a forward pass from layer to layer."""

    inside: list[tuple[str, nn.Module, Any]] = field(default_factory=list)
    """The layers that have begun and not ended: names, modules and their first inputs."""
    not_finite: str | None = None
    """The first layer that answered with NaN or infinity."""
    drew: str | None = None
    """The first layer that changed PyTorch's own random state."""

    @contextmanager
    def of(self, module: nn.Module) -> Iterator[None]:
        state = torch.get_rng_state()

        def begin(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            self.inside.append((names[layer], layer, inputs[0] if inputs else None))

        def end(layer: nn.Module, inputs: tuple[Any, ...], answer: Any) -> None:
            path = self.inside.pop()[0]
            if self.not_finite is None and isinstance(answer, Tensor) and not _finite(answer):
                self.not_finite = path
            if self.drew is None and not torch.equal(torch.get_rng_state(), state):
                self.drew = path

        names = {layer: path for path, layer in module.named_modules()}
        hooks = [layer.register_forward_pre_hook(begin) for layer in names]
        hooks += [layer.register_forward_hook(end) for layer in names]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _answer(tried: nn.Module, name: str, batch: Tensor, about: str) -> tuple[Any, _Trace]:
    """Return what the module answers in evaluation mode; whatever fails is one line."""
    trace = _Trace()
    try:
        with trace.of(tried), KeyedDraws(None):
            answer = tried(batch)
    except HoldfastError as error:
        raise ConfigError(f"model '{name}'{_where(trace)}: {error}") from error
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}{in_brackets(error)}"
        raise ConfigError(
            f"model '{name}' cannot read {about}{_where(trace)}: {said}{_advice(trace, batch)}"
        ) from error
    if trace.drew is not None:
        raise ConfigError(
            f"model '{name}'{_layer(trace.drew)} draws random numbers in evaluation mode, so its answers"
            " would not be repeatable; draw only in training (self.training)"
        )
    return answer, trace


def _where(trace: _Trace) -> str:
    """Name the innermost layer that did not end, and what it received."""
    if not trace.inside:
        return ""
    path, layer, given = trace.inside[-1]
    received = f" received {list(given.shape)}" if isinstance(given, Tensor) else ""
    if not path:
        return ""
    kind = (
        f"{type(layer).__name__}({layer.extra_repr()})"
        if not list(layer.children())
        else type(layer).__name__
    )
    return f": layer '{path}', {kind},{received or ' failed'}"


def _layer(path: str) -> str:
    return f": layer '{path}'" if path else ""


def _advice(trace: _Trace, batch: Tensor) -> str:
    """What to do about the most common mistakes."""
    layer, given = trace.inside[-1][1:] if trace.inside else (None, None)
    reads = getattr(trace.inside[0][1], "main_input_name", None) if trace.inside else None
    if reads == "input_ids" and batch.is_floating_point():  # a model of transformers
        return "; it reads tokens (whole numbers), and these samples are not: choose another model"
    if not isinstance(given, Tensor):
        return ""
    if isinstance(layer, nn.Embedding):
        if given.is_floating_point():
            return (
                "; an Embedding needs whole numbers (tokens), and these samples are not: choose another model"
            )
        largest = int(given.max()) if given.numel() else 0
        if largest >= layer.num_embeddings:
            return (
                f"; the samples hold token {largest}: set num_embeddings (vocab_size) to {largest + 1} or"
                " more, or use the tokens of the model's own tokeniser"
            )
    if not given.is_floating_point() and not batch.is_floating_point():
        return "; these samples are whole numbers (tokens of a text), which need an Embedding first"
    if isinstance(layer, nn.Linear) and given.shape[-1] != layer.in_features:
        return f"; set in_features to {given.shape[-1]}"
    if isinstance(layer, nn.modules.conv._ConvNd):
        axes = len(layer.kernel_size)
        if given.ndim != axes + 2:
            return f"; it needs [samples, channels{', length' if axes == 1 else ', height, width'}]"
        if given.shape[1] != layer.in_channels:
            return f"; set in_channels to {given.shape[1]}"
    return ""


def _check_answer(answer: Any, trace: _Trace, name: str, batch: Tensor, classes: int, data: str) -> None:
    wants = f"a batch of shape {list(batch.shape)}"
    if not isinstance(answer, Tensor) or answer.ndim != 2 or len(answer) != len(batch):
        given = f"shape {list(answer.shape)}" if isinstance(answer, Tensor) else f"a {type(answer).__name__}"
        pretrained = type(answer).__module__.startswith("transformers.")
        use = (
            "; use its variant for classification, such as BertForSequenceClassification"
            if pretrained
            else ""
        )
        raise ConfigError(
            f"model '{name}': returns {given} for {wants}; it must return a tensor"
            f" [{len(batch)}, {classes}], one row per sample, or an object that holds it as `logits`{use}"
        )
    if answer.shape[1] < classes:
        raise ConfigError(
            f"model '{name}': has {answer.shape[1]} outputs, but '{data}' has {classes} classes; it needs"
            f" {classes} or more"
        )
    if answer.shape[1] > classes:
        _log.warning(
            "model '%s' has %d outputs, but '%s' has %d classes; the others are never right",
            name,
            answer.shape[1],
            data,
            classes,
        )
    if not _finite(answer) and _finite(batch):
        first = f"; layer '{trace.not_finite}' is the first that does" if trace.not_finite else ""
        raise ConfigError(
            f"model '{name}': returns NaN or infinity for {wants} before any training{first}; check its start"
            " weights, or divisions by zero"
        )


def _check_training(tried: nn.Module, name: str, batch: Tensor) -> bool:
    """Return whether functions of the module draw in training; what cannot be drawn by key is an error. Any
    other failure is left to the training itself, whose loss may call the module in another way."""
    trace, draws = _Trace(), KeyedDraws(torch.zeros((), dtype=torch.int64))
    try:
        with trace.of(tried.train()), draws:
            tried(batch)
    except HoldfastError:
        raise
    except Exception:
        return draws.used
    if trace.drew is not None:
        raise ConfigError(
            f"model '{name}'{_layer(trace.drew)} draws random numbers that cannot be drawn by key, so the run"
            f" would not be repeatable; {HOW_TO_DRAW}"
        )
    return draws.used
