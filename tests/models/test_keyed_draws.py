"""What a model draws inside its forward pass: the same numbers alone and in a stack, on every plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from holdfast.core.errors import HoldfastError, RunError
from holdfast.core.keys import combine, mix_number, to_uniform
from holdfast.evaluation.evaluate import score
from holdfast.local.fit import Recipe
from holdfast.local.losses import Batch, cross_entropy
from holdfast.local.plan import Plan
from holdfast.local.programs import _programs, forget
from holdfast.models.keyed_draws import KeyedDraws
from tests.helpers import LOOP, VMAP, deal, network_of, random_samples, starts, train

RECIPE = Recipe(lr=0.1, epochs=2, batch_size=5)
COUNTS = [7, 2, 12]  # most epochs end with a batch that is padded in a stack
REPLAYED = [Plan(name) for name in ("captured-loop", "captured-vmap", "compiled-loop", "compiled-vmap")]


class Calls(nn.Module):
    """A linear layer around some function of one's own, as in a user's forward pass."""

    def __init__(self, draw: Callable[[Tensor, bool], Tensor]):
        super().__init__()
        self.draw, self.first, self.head = draw, nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.draw(torch.tanh(self.first(x)), self.training))


class Attends(nn.Module):
    """Tokens [batch, 4, 8] through a layer with attention; `first` says whether the batch comes first."""

    def __init__(self, layer: nn.Module, first: bool, call: Callable[..., Tensor] | None = None):
        super().__init__()
        self.into, self.layer, self.head = nn.Linear(3, 8), layer, nn.Linear(8, 3)
        self.first, self.call = first, call or (lambda layer, x: layer(x))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([self.into(x * (place + 1)) for place in range(4)], dim=1 if self.first else 0)
        return self.head(self.call(self.layer, x).mean(1 if self.first else 0))


def own_attention(layer: nn.Module, x: Tensor) -> Tensor:
    p = 0.3 if layer.training else 0.0
    return layer(F.scaled_dot_product_attention(x, x, x, dropout_p=p))


def masked(layer: nn.Module, x: Tensor) -> Tensor:
    """With a mask that depends on the samples, and one that looks only back."""
    causal = nn.Transformer.generate_square_subsequent_mask(4, dtype=x.dtype)
    padding = (x[:, :, 0] > 0.5) & (torch.arange(4) > 0)
    return layer(x, src_mask=causal, src_key_padding_mask=torch.where(padding, -math.inf, 0.0).to(x.dtype))


ATTENTION: dict[str, Callable[[], nn.Module]] = {
    "encoder layer": lambda: Attends(nn.TransformerEncoderLayer(8, 2, 16), False),
    "encoder": lambda: Attends(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2), True
    ),
    "masked": lambda: Attends(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), True, masked),
    "decoder layer": lambda: Attends(
        nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), True, lambda layer, x: layer(x, 2 * x)
    ),
    "attention": lambda: Attends(nn.MultiheadAttention(8, 2, 0.3), False, lambda layer, x: layer(x, x, x)[0]),
    "attention without weights": lambda: Attends(
        nn.MultiheadAttention(8, 2, 0.3, batch_first=True),
        True,
        lambda layer, x: layer(x, x, x, need_weights=False)[0],
    ),
    "function": lambda: Attends(nn.Linear(8, 8), True, own_attention),
}
FUNCTIONS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "dropout": lambda x, training: F.dropout(x, 0.4, training),
    "torch.dropout": lambda x, training: torch.dropout(x, 0.4, training),
    "in place": lambda x, training: F.dropout(x * 1, 0.4, training, inplace=True),
    "dropout2d": lambda x, training: F.dropout2d(x[..., None, None], 0.4, training).flatten(1),
    "alpha": lambda x, training: F.alpha_dropout(x, 0.4, training),
    "rrelu": lambda x, training: F.rrelu(x, training=training),
    "gumbel": lambda x, training: F.gumbel_softmax(x) if training else x,
    "noise": lambda x, training: x + torch.randn_like(x) * torch.rand(x.shape[1]) if training else x,
    "drop path": lambda x, training: (
        x * x.new_empty((len(x), 1)).bernoulli_(0.8).div_(0.8) if training else x
    ),
}


def trained(make: Callable[[], nn.Module], plan: Plan, recipe: Recipe = RECIPE) -> Tensor:
    network, samples = network_of(make), random_samples(60)
    state = torch.get_rng_state()
    fitted = train(network, starts(network, 3), samples, deal(samples, COUNTS), recipe, plan)
    assert torch.equal(torch.get_rng_state(), state)
    data, which = deal(samples, COUNTS), torch.arange(3)
    got = score(network, lambda net, x, aux: net(x), fitted.model, which, samples, data, plan)
    return torch.cat([fitted.model, got.loss[:, None].double()], 1)


@pytest.mark.parametrize("make", ATTENTION.values(), ids=ATTENTION)
def test_attention_draws_the_same_alone_and_in_a_stack(make: Callable[[], nn.Module]) -> None:
    torch.testing.assert_close(trained(make, VMAP), trained(make, LOOP), rtol=0, atol=1e-10)


@pytest.mark.parametrize("draw", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_draw_the_same_alone_and_in_a_stack(draw: Callable[[Tensor, bool], Tensor]) -> None:
    alone = trained(lambda: Calls(draw), LOOP)
    torch.testing.assert_close(trained(lambda: Calls(draw), VMAP), alone, rtol=0, atol=1e-10)
    assert not torch.allclose(alone, trained(lambda: Calls(lambda x, training: draw(x, False)), LOOP))


@pytest.mark.parametrize("plan", REPLAYED, ids=lambda plan: plan.name)
@pytest.mark.parametrize(
    "make", [ATTENTION["encoder"], lambda: Calls(FUNCTIONS["dropout"])], ids=["encoder", "F"]
)
def test_replayed_plans_draw_the_same(make: Callable[[], nn.Module], plan: Plan) -> None:
    torch.testing.assert_close(trained(make, plan), trained(make, LOOP), rtol=0, atol=1e-10)


@pytest.mark.parametrize("plan", [LOOP, VMAP], ids=["loop", "vmap"])
def test_a_loss_may_draw_too(plan: Plan) -> None:
    def noisy(net: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(net, batch._replace(x=batch.x + torch.randn_like(batch.x)))

    recipe = replace(RECIPE, loss=noisy)
    make = lambda: Calls(lambda x, training: x)  # noqa: E731
    torch.testing.assert_close(trained(make, plan, recipe), trained(make, LOOP, recipe), rtol=0, atol=1e-10)


def test_a_mask_by_hand() -> None:
    """The second call of a pass: position (2, 1) of the tensor, from the key, the call and the position."""
    key = torch.tensor(7)
    with KeyedDraws(key):
        first, second = F.dropout(torch.ones(3, 2), 0.3), F.dropout(torch.ones(3, 2), 0.3)
    place = torch.tensor(2) * (mix_number(1) | 1) + torch.tensor(1) * (mix_number(2) | 1)
    keep = to_uniform(combine(combine(key, -2), place)) >= 0.3
    assert float(second[2, 1]) == (pytest.approx(1 / 0.7) if keep else 0.0)
    assert not torch.equal(first, second)


def test_a_position_draws_the_same_in_a_larger_tensor() -> None:
    """A padded batch is larger, on whichever axis it lies."""

    def mask(*shape: int) -> Tensor:
        with KeyedDraws(torch.tensor(3)):
            return F.dropout(torch.ones(shape))

    assert torch.equal(mask(4, 9, 6)[:, :5], mask(4, 5, 6))
    assert torch.equal(mask(9, 4, 6)[:5], mask(5, 4, 6))


def test_draws_have_the_right_distribution() -> None:
    with KeyedDraws(torch.tensor(5)):
        dropped = F.dropout(torch.ones(300, 300), 0.3)
        normal = torch.randn(300, 300, dtype=torch.float64)
        alpha = F.alpha_dropout(torch.randn(300, 300), 0.3, training=True)
        late = torch.empty(300, 300).exponential_(2.0)
    assert float((dropped == 0).double().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.01)
    assert (float(normal.mean()), float(normal.var())) == pytest.approx((0.0, 1.0), abs=0.02)
    assert (float(alpha.mean()), float(alpha.var())) == pytest.approx((0.0, 1.0), abs=0.02)
    assert float(late.mean()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"attn_mask": torch.tensor([[True, False, False], [False, False, False], [True, True, True]])},
        {"attn_mask": torch.arange(9.0).view(3, 3), "scale": 0.3},
        {"enable_gqa": True},
    ],
    ids=["plain", "causal", "mask", "bias", "groups"],
)
def test_attention_without_dropout_is_that_of_pytorch(options: Any) -> None:
    query = torch.randn(2, 4, 3, 8, generator=torch.Generator().manual_seed(1))
    key = query[:, :2].flip(1) if "enable_gqa" in options else query.flip(1)
    with KeyedDraws(None):
        got = F.scaled_dot_product_attention(query, key, key + 1, **options)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(query, key, key + 1, **options))


def test_each_client_of_a_stack_has_its_own_numbers() -> None:
    def draw(key: Tensor) -> Tensor:
        with KeyedDraws(key):
            return torch.empty(4).uniform_(-1, 1)

    together = vmap(draw)(torch.tensor([1, 2]))
    assert torch.equal(together, torch.stack([draw(torch.tensor(1)), draw(torch.tensor(2))]))
    assert not torch.equal(together[0], together[1])


@pytest.mark.parametrize("plan", [LOOP, VMAP], ids=["loop", "vmap"])
def test_a_draw_without_a_key_is_a_clear_error(plan: Plan) -> None:
    def chosen(x: Tensor, training: bool) -> Tensor:
        return x * torch.multinomial(torch.ones(3), 1)

    with pytest.raises(HoldfastError, match=r"cannot be drawn by key.*use nn.Dropout, F.dropout, torch.rand"):
        trained(lambda: Calls(chosen), plan)


def test_drawing_in_evaluation_is_a_clear_error() -> None:
    with KeyedDraws(None), pytest.raises(RunError, match="evaluation mode.*training=self.training"):
        F.dropout(torch.ones(3))


def test_what_a_compiler_is_given_draws_the_same() -> None:
    """A step with attention, traced as a list of tensor operations."""
    forget()
    trained(ATTENTION["encoder"], Plan("compiled-vmap", sizes=(5,)))
    (ready,) = _programs.values()
    traced, now = ready.traced(), ready.memory["now"]
    now[:, -4], now[:3, -3] = torch.tensor([4, 3, 2, 0, 0]), torch.tensor([1, 0, 1])
    want, got = ready._step(ready.memory), traced(ready.memory)
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=0, atol=1e-12)
