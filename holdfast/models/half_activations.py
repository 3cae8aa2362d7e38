"""Activations in bfloat16: what layers hand to each other and keep for the backward pass takes half the
memory of float32. Weights, their gradients, statistics of normalisation layers, losses and updates stay in
float32.

`torch.autocast` alone does not give this. It multiplies in bfloat16, but its GroupNorm and LayerNorm return
float32, and so does the sum of a product and a bias, so that everything up to the next product is float32
again, and is written down in both types. And under vmap it does not see convolutions and linear layers at
all. So weights are rounded here, and so are the inputs of layers that have some."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from holdfast.core.device import Precision, autocast
from holdfast.models.hashed_embedding import HashedEmbedding
from holdfast.models.normalisation import own_formulas_asked

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_rounding: list[bool] = []


def rounding() -> bool:
    """Whether activations are bfloat16 now."""
    return bool(_rounding)


def rounded(x: Tensor) -> Tensor:
    """The same in bfloat16 if activations are; float64 and integers stay."""
    return x.bfloat16() if _rounding and x.dtype == torch.float32 else x


def rounds_weights(layer: nn.Module) -> bool:
    """Whether the layer computes with its own parameters in bfloat16. Normalisation layers take theirs as
    they are, and of a table only rows are read."""
    tables = (nn.Embedding, nn.EmbeddingBag, HashedEmbedding)
    return bool(layer._parameters) and not isinstance(layer, (*NORMS, *tables)) and not _is_wide(layer)


def rounded_names(module: nn.Module) -> frozenset[str]:
    """The names of the parameters that layers compute with in bfloat16."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, layer in module.named_modules()
        if rounds_weights(layer)
        for name in layer._parameters
    )


@contextmanager
def computing(
    module: nn.Module, head: str | None, device: torch.device, precision: Precision
) -> Iterator[None]:
    """The context in which a model and its loss run. With activations in bfloat16, every layer hands on
    bfloat16, and the model as a whole and its head return float32, so that the loss is computed in
    float32."""
    with autocast(device, precision):
        if precision != "bf16-activations":
            yield
            return
        ends = [module, *([module.get_submodule(head)] if head else [])]
        hooks = [layer.register_forward_hook(_round) for layer in module.modules() if layer not in ends]
        hooks += [end.register_forward_hook(_widen) for end in ends]
        hooks += [
            layer.register_forward_pre_hook(_round_inputs)
            for layer in module.modules()
            if rounds_weights(layer)
        ]
        _rounding.append(True)
        try:
            yield
        finally:
            _rounding.pop()
            for hook in hooks:
                hook.remove()


def _is_wide(layer: nn.Module) -> bool:
    return getattr(layer, "returns_wide", False)


def _round(layer: nn.Module, _inputs: object, output: object) -> object:
    if _is_wide(layer) and own_formulas_asked():
        return output  # rounded by what comes next
    return rounded(output) if isinstance(output, Tensor) else output


def _round_inputs(_layer: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(rounded(each) if isinstance(each, Tensor) else each for each in inputs)


def _widen(_layer: nn.Module, _inputs: object, output: object) -> object:
    return output.float() if isinstance(output, Tensor) and output.dtype == torch.bfloat16 else output
