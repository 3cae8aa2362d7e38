from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.models.network import Network
from holdfast.models.own_module import Model


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))


def network(make: object = net, **options: object) -> Network:
    return Network(make, head=None, **options)  # type: ignore[arg-type]


# ---- start models


def test_the_start_depends_on_the_key_alone() -> None:
    n = network()
    torch.manual_seed(1)
    first = n.initial(Key(0))
    before = torch.get_rng_state()
    assert torch.equal(n.initial(Key(0)), first)
    assert torch.equal(torch.get_rng_state(), before)  # the global random state does not change
    assert not torch.equal(n.initial(Key(1)), first)
    assert torch.equal(network().initial(Key(0)), first)


def test_load_gives_the_users_own_kind_of_module() -> None:
    n = network()
    vector = n.initial(Key(0))
    vector[n.layout.under("1.num_batches_tracked")] = 7
    module = n.load(vector)
    assert [type(m) for m in module] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Dropout, nn.Linear]
    assert module[1].num_batches_tracked.item() == 7 and module[1].num_batches_tracked.dtype == torch.int64
    flat = n.layout.flatten(
        {**dict(module.named_parameters()), **dict(module.named_buffers())}, torch.float32
    )
    assert torch.equal(flat, vector)
    assert n.load(vector) is not module


def test_averaged_counters_are_rounded_not_cut() -> None:
    n = network()
    vector = n.initial(Key(0))
    vector[n.layout.under("1.num_batches_tracked")] = 6.9999995
    assert n.load(vector)[1].num_batches_tracked.item() == 7


def test_a_users_module_is_copied_and_left_alone() -> None:
    mine = net()
    before = copy.deepcopy(mine.state_dict())
    n = network(Model(mine, head=None).make)
    vector = n.initial(Key(0))
    assert torch.equal(vector, n.initial(Key(1)))  # a module is a start of its own
    first, second = n.load(vector), n.load(vector + 1)
    assert first is not second and first is not mine
    assert all(torch.equal(mine.state_dict()[k], v) for k, v in before.items())
    assert torch.equal(first[0].weight, before["0.weight"])


def test_buffers_that_are_not_saved_and_whole_numbers() -> None:
    """A table of positions and a constant: neither learned nor averaged, but part of the module."""

    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(3, 2)
            self.register_buffer("order", torch.tensor([2, 0, 1]))
            self.register_buffer("scale", torch.tensor(2.0), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x[:, self.order] * self.scale)

    n = network(Indexed)
    vector, x = n.initial(Key(0)), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    module = n.load(vector)
    assert module.order.tolist() == [2, 0, 1] and module.scale == 2
    stacked = vmap(lambda tensors: functional_call(n.module, tensors, (x,)))(
        n.layout.tensors(vector.repeat(2, 1))
    )
    torch.testing.assert_close(stacked[0], module(x))


# ---- heads


def test_the_entries_of_the_head() -> None:
    n = Network(lambda: nn.ModuleDict({"body": nn.Linear(2, 2), "fc": nn.Linear(2, 1)}), head="fc")
    assert n.head.nonzero().flatten().tolist() == [6, 7, 8]
    with pytest.raises(ConfigError, match="no submodule named 'fcc' for the head; did you mean 'fc'"):
        Network(lambda: nn.ModuleDict({"body": nn.Linear(2, 2), "fc": nn.Linear(2, 1)}), head="fcc")
    with pytest.raises(ConfigError, match="needs a head; name the submodule"):
        _ = network().head


def test_a_module_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameters"):
        network(lambda: nn.ReLU())


@pytest.mark.parametrize("layer", [nn.SyncBatchNorm(4)])
def test_unsupported_layers_are_refused(layer: nn.Module) -> None:
    with pytest.raises(ConfigError, match=type(layer).__name__):
        network(lambda: nn.Sequential(nn.Linear(3, 4), layer))


# ---- Dropout


def drop(module: nn.Module, key: int, x: Tensor) -> Tensor:
    n = network(lambda: nn.Sequential(nn.Linear(1, 1), module))
    n.module.train()
    return functional_call(n.module[1], {"dropout_key": Key(key).bits}, (x,))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_rate_and_scale(p: float) -> None:
    out = drop(nn.Dropout(p), 0, torch.ones(400, 250, dtype=torch.float64))
    assert abs(float((out == 0).double().mean()) - p) < 0.005
    assert torch.allclose(out[out != 0], torch.tensor(1 / (1 - p), dtype=torch.float64))


def test_dropout_masks_depend_on_the_key() -> None:
    x = torch.ones(5, 40)
    assert torch.equal(drop(nn.Dropout(0.5), 3, x), drop(nn.Dropout(0.5), 3, x))
    assert not torch.equal(drop(nn.Dropout(0.5), 3, x), drop(nn.Dropout(0.5), 4, x))
    assert torch.equal(
        drop(nn.Dropout(0.5), 3, x)[:2], drop(nn.Dropout(0.5), 3, x[:2])
    )  # padding a batch changes none of its first rows


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Dropout1d(0.5), (6, 8, 5)), (nn.Dropout2d(0.5), (6, 8, 3, 3)), (nn.Dropout3d(0.5), (6, 8, 2, 2, 2))],
)
def test_whole_channels_are_dropped(layer: nn.Module, shape: tuple[int, ...]) -> None:
    kept = (drop(layer, 0, torch.ones(shape)) != 0).flatten(2)
    assert (kept.all(2) | ~kept.any(2)).all() and 0.2 < kept.float().mean() < 0.8


def test_layers_draw_independently_also_when_one_layer_is_used_twice() -> None:
    class Twice(nn.Module):
        def __init__(self, shared: bool) -> None:
            super().__init__()
            self.a = nn.Dropout(0.5)
            self.b = self.a if shared else nn.Dropout(0.5)
            self.line = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.a(x), self.b(x)])

    for shared in (True, False):
        n = network(lambda shared=shared: Twice(shared))
        n.module.train()
        first = functional_call(n.module, n.context(None, Key(0).bits), (torch.ones(2000),))
        again = functional_call(n.module, n.context(None, Key(0).bits), (torch.ones(2000),))
        assert torch.equal(first, again)
        both = ((first[0] != 0) == (first[1] != 0)).float().mean()
        assert 0.4 < both < 0.6


def test_one_layer_in_two_places_is_replaced_in_both() -> None:
    def make() -> nn.Module:
        shared = nn.Dropout(0.5)
        return nn.Sequential(nn.Linear(3, 3), shared, nn.Linear(3, 3), shared)

    n = network(make)
    assert not any(isinstance(m, nn.Dropout) for m in n.module)
    assert n.module[1] is n.module[3]


def test_dropout_is_off_in_evaluation() -> None:
    n = network()
    n.module.eval()
    x = torch.ones(2, 3)
    assert torch.equal(n.module(x), n.module(x))
    assert torch.equal(n.module[3](x), x)


# ---- BatchNorm


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5), (6, 4, 3, 3)], ids=["1d", "sequence", "2d"])
def test_batch_norm_ignores_padding(shape: tuple[int, ...]) -> None:
    make = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    n = network(lambda: nn.Sequential(make(4)), dtype=torch.float64)
    x = Key(0).normal(*shape, dtype=torch.float64) * 3 + 1
    reference = make(4).double().train()
    expected = reference(x[:5])
    mask = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    n.module.train()
    buffers = {k: v.clone() for k, v in n.module.named_buffers() if "mask" not in k}
    out = functional_call(n.module, buffers | n.context(mask, None), (x,))
    torch.testing.assert_close(out[:5], expected, rtol=0, atol=1e-12)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(
            buffers[f"0.{name}"].double(), getattr(reference, name).double(), rtol=0, atol=1e-12
        )
    n.module.eval()
    torch.testing.assert_close(
        functional_call(n.module, buffers, (x,)), reference.eval()(x), rtol=0, atol=1e-12
    )


def test_a_bare_batch_norm_or_dropout_as_the_whole_module() -> None:
    assert type(network(lambda: nn.BatchNorm1d(3)).module).__name__ == "_MaskedBatchNorm"


def test_other_layers_are_left_alone() -> None:
    n = network(
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 2)
        )
    )
    assert n.keyed == [] and n.masked == []
    x = torch.randn(2, 1, 4, 4)
    module = n.load(n.initial(Key(0)))
    views = n.layout.unflatten(n.initial(Key(0)))
    assert torch.equal(functional_call(n.module, views, (x,)), module(x))


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x)))

    n = network(Tied)
    assert n.layout.size == 9
    module = n.load(torch.arange(9.0))
    assert module.a.weight is module.b.weight and torch.equal(module.b.weight.flatten(), torch.arange(9.0))
