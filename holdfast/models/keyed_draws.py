"""Draw by key what a model draws inside its forward pass, such as F.dropout, the Dropout of attention and
torch.rand.

A layer `nn.Dropout` is replaced by one that has its key as a buffer (network.py); a function has no place
for a key. Therefore the functions that draw are answered by a mode, which is active while one batch passes
through the model and the loss. It numbers the calls in their order and draws from (key, number of the call,
position), so a client draws the same alone and in a stack.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from holdfast.core.errors import RunError
from holdfast.core.keys import combine, mix_number, to_uniform

HOW_TO_DRAW = (
    "use nn.Dropout, F.dropout, torch.rand, torch.randn or torch.bernoulli, which Holdfast draws by key"
)
ALWAYS = (nn.MultiheadAttention, nn.RReLU, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""Layers that call such functions, or have shortcuts for evaluation that stacks cannot take."""
_STRIDES = [mix_number(place + 1) | 1 for place in range(16)]
_SELU = 1.7580993408473766  # the value of a unit that alpha dropout drops, with its sign reversed


class UnkeyedDraw(RunError):
    """The model or the loss draws random numbers that do not come from a key."""

    def __init__(self, said: str = ""):
        super().__init__(
            said
            or "the model or the loss draws random numbers that cannot be drawn by key (torch.multinomial, or"
            f" a dropout inside nn.LSTM?), so the run would not be repeatable; {HOW_TO_DRAW}"
        )


class KeyedDraws(TorchFunctionMode):
    """Answers functions that draw. Without a key, as in evaluation, drawing is an error."""

    def __init__(self, key: Tensor | None):
        super().__init__()
        self.key, self.calls = key, 0
        self.used = False
        """Whether a function was answered here that draws, or that stacks cannot run."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        answer = _ANSWERS.get(func)
        if answer is None:
            return func(*args, **(kwargs or {}))
        self.used |= func not in _EMPTY
        return answer(self, *args, **(kwargs or {}))

    def uniform(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Numbers in [0, 1) for the next call. A number depends on its own position but not on the size of
        the tensor, so a batch that is padded draws what it draws without padding, whichever axis it lies
        on."""
        if self.key is None:
            raise RunError(
                "the model draws random numbers in evaluation mode, so its answers would not be repeatable;"
                " draw only in training, as in F.dropout(x, p, training=self.training)"
            )
        bits, self.calls = combine(self.key, -1 - self.calls), self.calls + 1
        place = torch.zeros((), dtype=torch.int64, device=device)
        for axis, size in enumerate(shape):
            along = torch.arange(size, device=device) * _STRIDES[axis]
            place = place + along.view(-1, *[1] * (len(shape) - axis - 1))
        return to_uniform(combine(bits, place), dtype)

    def keep(self, x: Tensor, p: float, shape: Sequence[int] | None = None) -> Tensor:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        return self.uniform(x.shape if shape is None else shape, x.device, torch.float32) >= p


def _dropped(x: Tensor, keep: Tensor, p: float, inplace: bool) -> Tensor:
    out = (
        x * 0.0 if p == 1.0 else torch.where(keep, x / (1.0 - p), torch.zeros((), dtype=x.dtype).to(x.device))
    )
    return x.copy_(out) if inplace else out


def _dropout(
    draws: KeyedDraws, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0.0:
        return input
    return _dropped(input, draws.keep(input, p), p, inplace)


def _aten_dropout(draws: KeyedDraws, input: Tensor, p: float, train: bool) -> Tensor:
    return _dropout(draws, input, p, train)


def _channels(unbatched: int | None) -> Callable[..., Tensor]:
    """Dropout of whole channels: [samples, channels, ...] or, with so many axes, [channels, ...]."""

    def answer(
        draws: KeyedDraws, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0.0:
            return input
        return _dropped(input, draws.keep(input, p, _of_channels(input, unbatched)), p, inplace)

    return answer


def _of_channels(x: Tensor, unbatched: int | None = None) -> list[int]:
    own = 1 if x.ndim == unbatched else 2
    return [*x.shape[:own], *[1] * (x.ndim - own)]


def _alpha(channels: bool) -> Callable[..., Tensor]:
    """Dropout for SELU networks: dropped units get a fixed value, then mean and variance are restored."""

    def answer(
        draws: KeyedDraws, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0.0:
            return input
        keep = draws.keep(input, p, _of_channels(input) if channels else None)
        scale = 0.0 if p == 1.0 else 1.0 / math.sqrt((_SELU**2 * p + 1.0) * (1.0 - p))
        low = torch.full((), -_SELU, dtype=input.dtype).to(input.device)
        out = torch.where(keep, input, low) * scale + _SELU * scale * p
        return input.copy_(out) if inplace else out

    return answer


def _rrelu(
    draws: KeyedDraws,
    input: Tensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    if not training:
        return F.leaky_relu(input, (lower + upper) / 2, inplace)
    slope = lower + (upper - lower) * draws.uniform(input.shape, input.device, input.dtype)
    out = torch.where(input > 0, input, input * slope)
    return input.copy_(out) if inplace else out


def _attention(
    draws: KeyedDraws,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as plain matrix products: its fused kernels neither draw by key nor run in stacks."""
    if enable_gqa:
        key, value = (
            part.repeat_interleave(query.shape[-3] // part.shape[-3], dim=-3) for part in (key, value)
        )
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        sides = scores.shape[-2:]
        attn_mask = torch.ones(sides, dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    # a place that may look at nothing gets zeros, as in PyTorch; its softmax would be NaN
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    if dropout_p > 0.0:
        weights = _dropped(weights, draws.keep(weights, dropout_p), dropout_p, inplace=False)
    return weights.to(value.dtype) @ value


def _opened(function: Callable[..., Any]) -> Callable[..., Any]:
    """Answer a Python function of PyTorch by its own code, in which this mode stays active."""

    def answer(draws: KeyedDraws, *args: Any, **kwargs: Any) -> Any:
        with draws:
            return _without_check(function)(*args, **kwargs)

    return answer


@cache
def _without_check(function: Any) -> Callable[..., Any]:
    """Return the function with globals in which no argument asks for a mode: else it would end up here
    again."""
    tests = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**function.__globals__, **dict.fromkeys(tests, lambda *given: False)}
    own = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _normal(u: Tensor, v: Tensor) -> Tensor:
    """Standard normal numbers by Box and Muller."""
    return torch.sqrt(-2.0 * torch.log(1.0 - u)) * torch.cos(2.0 * math.pi * v)


def _drawn(draws: KeyedDraws, like: Tensor, kind: str) -> Tensor:
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32

    def uniform() -> Tensor:
        return draws.uniform(like.shape, like.device, dtype)

    if kind == "uniform":
        return uniform().to(like.dtype)
    if kind == "exponential":
        return (-torch.log(1.0 - uniform())).to(like.dtype)
    return _normal(uniform(), uniform()).to(like.dtype)


def _factory(kind: str) -> Callable[..., Tensor]:
    """torch.rand and torch.randn, with all their ways to give a shape."""

    def answer(draws: KeyedDraws, *size: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        return _drawn(draws, torch.empty(*size, **kwargs), kind)

    return answer


def _like(kind: str) -> Callable[..., Tensor]:
    def answer(draws: KeyedDraws, input: Tensor, **kwargs: Any) -> Tensor:
        return _drawn(draws, torch.empty_like(input, **kwargs), kind)

    return answer


def _bernoulli(draws: KeyedDraws, input: Tensor, p: float | None = None, generator: Any = None) -> Tensor:
    u = draws.uniform(input.shape, input.device, torch.float32)
    return (u < (input if p is None else p)).to(input.dtype)


def _in_place(drawn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def answer(draws: KeyedDraws, self: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        return self.copy_(drawn(draws, self, *args, **kwargs))

    return answer


def _uniform_between(draws: KeyedDraws, like: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * _drawn(draws, like, "uniform")


def _normal_around(draws: KeyedDraws, like: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return mean + std * _drawn(draws, like, "normal")


def _exponential(draws: KeyedDraws, like: Tensor, lambd: float = 1.0) -> Tensor:
    return _drawn(draws, like, "exponential") / lambd


def _bernoulli_of(draws: KeyedDraws, like: Tensor, p: float | Tensor = 0.5) -> Tensor:
    return (draws.uniform(like.shape, like.device, torch.float32) < p).to(like.dtype)


def _empty(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A new tensor with one row per client, so that it can be filled with numbers that differ by client."""

    def answer(draws: KeyedDraws, *args: Any, **kwargs: Any) -> Tensor:
        out = function(*args, **kwargs)
        own = torch.zeros((), dtype=torch.int64) if draws.key is None else draws.key
        return torch.where(own.to(out.device) == own.to(out.device), out, out)

    return answer


_ANSWERS: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: _aten_dropout,
    F.dropout1d: _channels(unbatched=2),
    F.dropout2d: _channels(unbatched=None),
    F.dropout3d: _channels(unbatched=4),
    F.alpha_dropout: _alpha(channels=False),
    F.feature_alpha_dropout: _alpha(channels=True),
    F.rrelu: _rrelu,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _opened(F.multi_head_attention_forward),
    F.gumbel_softmax: _opened(F.gumbel_softmax),
    torch.rand: _factory("uniform"),
    torch.randn: _factory("normal"),
    torch.rand_like: _like("uniform"),
    torch.randn_like: _like("normal"),
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _in_place(_bernoulli_of),
    Tensor.uniform_: _in_place(_uniform_between),
    Tensor.normal_: _in_place(_normal_around),
    Tensor.exponential_: _in_place(_exponential),
}
_EMPTY = {function: _empty(function) for function in (torch.empty, torch.empty_like, Tensor.new_empty)}
_ANSWERS |= _EMPTY
