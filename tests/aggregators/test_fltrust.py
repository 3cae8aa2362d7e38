from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.aggregators.fltrust import FLTrust
from holdfast.core.errors import ConfigError
from holdfast.core.flat import Layout
from tests.checks.aggregator_cases import apply, context_of
from tests.helpers import tiny

X = torch.tensor([[3.0, 0.0], [5.0, 5.0], [-1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
W = torch.full((4,), 0.25, dtype=torch.float64)
ROOT = torch.tensor([2.0, 0.0], dtype=torch.float64)


def test_by_hand() -> None:
    """Trust 1, 1/sqrt 2, 0, 0; both trusted updates get the root's length 2."""
    half = 2**-0.5
    got = apply("fltrust", X, W, root=ROOT)
    torch.testing.assert_close(got.weights, torch.tensor([1, half, 0, 0], dtype=torch.float64) / (1 + half))
    torch.testing.assert_close(
        got.value, torch.tensor([2 + half * 2 * half, half * 2 * half], dtype=torch.float64) / (1 + half)
    )


def test_without_a_trusted_client_the_update_is_zero() -> None:
    got = apply("fltrust", -X[:2], W[:2], root=ROOT)
    assert got.value.tolist() == [0, 0] and got.weights.tolist() == [0, 0]
    assert apply("fltrust", X, W, root=ROOT * 0).value.tolist() == [0, 0]


def test_only_the_first_tensor_gets_the_length_in_fedcaps_code() -> None:
    x = torch.tensor([[2.0, 2.0, 1.0], [4.0, 4.0, 2.0]], dtype=torch.float64)
    ctx = context_of(x, root=x[0])
    ctx = type(ctx)(ctx.ids, ctx.received, Layout.of(nn.Linear(2, 1)), ctx.key, 1, 0, x[0])
    torch.testing.assert_close(FLTrust()(x, W[:2] * 2, {}, ctx).value, x[0])
    torch.testing.assert_close(
        FLTrust(variant="authors")(x, W[:2] * 2, {}, ctx).value,
        torch.tensor([2, 2, 1.5], dtype=torch.float64),
    )


def test_a_huge_update_is_brought_to_length() -> None:
    x = torch.tensor([[1e30, 0.0], [1.0, 0.0]])
    torch.testing.assert_close(
        apply("fltrust", x, torch.tensor([0.5, 0.5]), root=ROOT.float()).value, ROOT.float()
    )


def test_needs_the_servers_own_data() -> None:
    with pytest.raises(ConfigError, match="set data.root"):
        tiny(aggregator="fltrust").parts()
