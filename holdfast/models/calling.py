"""How a module of the user's own is called: one batch of samples goes in, logits come out.

Modules of Hugging Face's transformers return an object with `logits`, and want to know which tokens are
padding. Hooks do both, so names of parameters stay as they are, and a call with keywords is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

_STACKED = "holdfast"  # name of our attention among those of transformers


def adapt(module: nn.Module) -> nn.Module:
    """Make the module answer one batch with a tensor of logits, where its own answer holds them."""
    if hasattr(getattr(module, "config", None), "pad_token_id"):
        module.register_forward_pre_hook(_with_attention_mask, with_kwargs=True)
    module.register_forward_hook(_logits_only, with_kwargs=True)
    return module


def logits_in(answer: Any) -> Tensor | None:
    """Return the logits that a dict or an object holds, or None."""
    if isinstance(answer, Tensor):
        return None
    held = answer.get("logits") if isinstance(answer, Mapping) else getattr(answer, "logits", None)
    return held if isinstance(held, Tensor) else None


def _alone(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether this is a call as Holdfast makes it: with one batch and nothing else."""
    return len(args) == 1 and isinstance(args[0], Tensor) and not kwargs.keys() - {"attention_mask"}


def _with_attention_mask(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Tell a model of tokens which of them are padding: those with the id that its config names, or 0."""
    if not _alone(args, kwargs) or kwargs or args[0].is_floating_point():
        return None
    padding = getattr(module, "config").pad_token_id  # noqa: B009
    return args, {"attention_mask": (args[0] != (0 if padding is None else padding)).long()}


def _logits_only(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> Any:
    return logits_in(answer) if _alone(args, kwargs) else None


def is_pretrained_model(module: nn.Module) -> bool:
    """Whether it is a model of transformers, which then has been imported already."""
    return any(cls.__module__ == "transformers.modeling_utils" for cls in type(module).__mro__)


def stackable(module: nn.Module) -> nn.Module:
    """Prepare models of transformers inside a module for stacks, in place. Their usual attention looks at
    the mask's values to choose a kernel, which a stack cannot do; ours always builds the mask."""
    if is_pretrained_model(module):
        _use_our_attention(module)
    else:
        for child in module.children():
            stackable(child)
    return module


def _use_our_attention(module: Any) -> None:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask
    except ImportError:  # a version without exchangeable attention
        return

    def full_mask(*args: Any, **kwargs: Any) -> Any:
        never = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(*args, **{**kwargs, **never})

    AttentionInterface.register(_STACKED, sdpa_attention_forward)
    AttentionMaskInterface.register(_STACKED, full_mask)
    if getattr(module.config, "_attn_implementation", None) == "sdpa":
        module.set_attn_implementation(_STACKED)
    if getattr(module.config, "use_cache", False):
        module.config.use_cache = False  # a cache is for writing text, one token after the other
