from __future__ import annotations

import torch
from torch import nn

from holdfast.core.flat import Layout, Wire


def module() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    net[2].bias.requires_grad_(False)
    return net


LAYOUT = Layout.of(module())
NAMED = {
    "0.weight": (3, 2),
    "0.bias": (3,),
    "1.weight": (3,),
    "1.bias": (3,),
    "2.weight": (1, 3),
    "2.bias": (1,),
}
BUFFERS = {"1.running_mean": (3,), "1.running_var": (3,), "1.num_batches_tracked": ()}


def test_parameters_first_then_buffers() -> None:
    assert {s.name: s.shape for s in LAYOUT.slots} == NAMED | BUFFERS
    assert [s.name for s in LAYOUT.slots] == [*NAMED, *BUFFERS]
    assert LAYOUT.parameters == 6 + 3 + 3 + 3 + 3 + 1 and LAYOUT.size == LAYOUT.parameters + 7
    assert [s.start for s in LAYOUT.slots] == [0, 6, 9, 12, 15, 18, 19, 22, 25]


def test_equal_architectures_have_equal_layouts() -> None:
    assert Layout.of(module()) == LAYOUT
    assert Layout.of(nn.Sequential(nn.Linear(2, 3))) != LAYOUT


def test_masks_select_the_tensors_of_a_submodule() -> None:
    assert LAYOUT.trainable.nonzero().flatten().tolist() == list(
        range(18)
    )  # not the frozen bias, not the buffers
    assert LAYOUT.under("1").nonzero().flatten().tolist() == [*range(9, 15), *range(19, 26)]
    assert LAYOUT.under("2.weight").nonzero().flatten().tolist() == [15, 16, 17]
    assert not LAYOUT.under("").any() and not LAYOUT.under("1.run").any()


def test_round_trip_with_any_leading_axes() -> None:
    for lead in ((), (4,), (2, 3)):
        vector = torch.arange(26 * torch.Size(lead).numel(), dtype=torch.float64).view(*lead, 26)
        named = LAYOUT.unflatten(vector)
        assert {name: tuple(t.shape) for name, t in named.items()} == {
            s.name: (*lead, *s.shape) for s in LAYOUT.slots
        }
        assert torch.equal(LAYOUT.flatten(named), vector)


def test_unflattened_tensors_are_views() -> None:
    vector = torch.zeros(2, 26)
    LAYOUT.unflatten(vector)["2.bias"].fill_(7)
    assert vector[:, 18].tolist() == [7, 7] and vector.sum() == 14


def test_counters_survive_flattening() -> None:
    net = module()
    net[1].num_batches_tracked.fill_(5)
    flat = LAYOUT.flatten({**dict(net.named_parameters()), **dict(net.named_buffers())}, torch.float32)
    assert flat.dtype == torch.float32 and flat[25] == 5


def test_a_whole_wire_copies_nothing() -> None:
    wire = Wire.of(LAYOUT, torch.ones(26, dtype=torch.bool))
    model = torch.arange(26.0)
    assert wire.whole and wire.size == 26 and wire.parameters == 19 and wire.buffers == 7
    assert wire.pack(model).data_ptr() == model.data_ptr()
    assert torch.equal(wire.unpack(model, torch.zeros(26)), model)


def test_a_part_travels_and_the_rest_stays_the_clients_own() -> None:
    wire = Wire.of(LAYOUT, ~LAYOUT.under("2"))
    assert not wire.whole and (wire.size, wire.parameters, wire.buffers) == (22, 15, 7)
    model, own = torch.arange(26.0).expand(2, -1), -torch.ones(2, 26)
    sent = wire.pack(model)
    assert sent[0].tolist() == [*range(15), *range(19, 26)]  # shared parameters, then shared buffers
    back = wire.unpack(sent, own)
    assert (
        torch.equal(back[:, ~LAYOUT.under("2")], model[:, ~LAYOUT.under("2")])
        and (back[:, LAYOUT.under("2")] == -1).all()
    )
    assert (own == -1).all()


def test_a_wire_without_entries_changes_no_model() -> None:
    wire = Wire.of(LAYOUT, torch.zeros(26, dtype=torch.bool))
    assert (wire.size, wire.parameters, wire.whole) == (0, 0, False)
    assert wire.pack(torch.ones(3, 26)).shape == (3, 0)
    assert torch.equal(wire.unpack(torch.zeros(3, 0), torch.ones(3, 26)), torch.ones(3, 26))


def test_the_layout_of_a_wire_names_the_travelling_entries():
    whole = Layout.of(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))
    shared = torch.ones(whole.size, dtype=torch.bool)
    shared[0:2] = False  # one row of the first weight stays
    shared[whole.under("2")] = False  # and the whole last layer
    part = Wire.of(whole, shared).layout(whole)
    assert [(s.name, s.shape, s.start, s.stop) for s in part.slots] == [
        ("0.weight", (4, 1), 0, 4),
        ("0.bias", (3,), 4, 7),
        ("1.weight", (3,), 7, 10),
        ("1.bias", (3,), 10, 13),
    ]
    assert Wire.of(whole, torch.ones(whole.size, dtype=torch.bool)).layout(whole).size == whole.parameters
