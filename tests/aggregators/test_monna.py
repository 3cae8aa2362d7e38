from __future__ import annotations

import pytest
import torch

from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import build
from tests.checks.aggregator_cases import apply
from tests.helpers import tiny

LINE = torch.tensor([[0.0], [1.0], [3.0], [10.0], [11.0]], dtype=torch.float64)
EVEN = torch.full((5,), 0.2, dtype=torch.float64)


def test_by_hand() -> None:
    """The median of 0, 1, 3, 10, 11 is 3; the server's own update of 10.5, and client 4, have 3, 10 and 11
    nearest."""
    assert apply("monna", LINE, EVEN, f=1).value.tolist() == [3.5]
    assert apply("monna", LINE, EVEN, f=2).weights.tolist() == [1 / 3, 1 / 3, 1 / 3, 0, 0]
    root = torch.tensor([10.5], dtype=torch.float64)
    assert apply("monna", LINE, EVEN, f=2, root=root, reference="root").value.tolist() == [8.0]
    ids = torch.tensor([9, 8, 7, 6, 4])
    got = apply("monna", LINE, EVEN, ids, f=2, reference="client", trusted=4)
    assert got.value.tolist() == [8.0] and not got.fallback


def test_the_trusted_client_is_averaged_also_where_others_sent_the_same() -> None:
    x = torch.tensor([[5.0], [5.0], [5.0]], dtype=torch.float64)
    got = apply("monna", x, EVEN[:3], f=1, reference="client", trusted=2)
    assert got.weights.tolist() == [0.5, 0, 0.5]


def test_without_its_reference_it_falls_back() -> None:
    got = apply("monna", LINE, EVEN, f=1, reference="client", trusted=17)
    assert got.fallback and got.value.tolist() == [3.0]


@pytest.mark.parametrize("n", [3, 8, 13])
def test_against_the_slow_reference(n: int) -> None:
    x, f = Key(n).normal(n, 4, dtype=torch.float64), (n - 1) // 2
    middle = x.quantile(0.5, dim=0)
    nearest = sorted(range(n), key=lambda i: float((x[i] - middle).norm()))[: n - f]
    got = apply("monna", x, torch.full((n,), 1 / n, dtype=torch.float64), f=f)
    torch.testing.assert_close(got.value, x[nearest].mean(dim=0))


def test_what_a_reference_needs() -> None:
    with pytest.raises(ConfigError, match="set data.root"):
        tiny(aggregator={"name": "monna", "f": 1, "reference": "root"}).parts()
    assert tiny(aggregator={"name": "monna", "f": 1}).parts()
    for settings in ({"reference": "client"}, {"trusted": 3}):
        with pytest.raises(ConfigError, match="trusted, the id of that client, are set together"):
            build("aggregator", {"name": "monna", "f": 1, **settings})


def test_a_trusted_client_has_to_be_there() -> None:
    """It has to be one of the run's, and not a bucket of several."""
    rule = {"name": "monna", "f": 1, "reference": "client"}
    with pytest.raises(ConfigError, match="aggregator.trusted: the clients are 0 to 4, got 5"):
        tiny(aggregator={**rule, "trusted": 5, "wrap": ["nnm"]}).parts()
    assert tiny(aggregator={**rule, "trusted": 4, "wrap": ["nnm"]}).parts()
    with pytest.raises(ConfigError, match="'monna' trusts one client, but it sees buckets of several"):
        tiny(aggregator={**rule, "trusted": 4, "f": 0.1, "wrap": ["bucketing"]}).parts()


def test_a_trusted_reference_bears_attackers_that_move_the_median() -> None:
    """The claim of the paper is f < n / 2 with a vector of one's own: 7 of 15 attackers, who stand together
    near the honest updates, draw the median to themselves and then are averaged; they do not draw an honest
    update."""
    errors = {"median": 0.0, "client": 0.0}
    for seed in range(10):
        x = Key(seed).normal(15, 30, dtype=torch.float64)
        honest = x[7:].mean(dim=0)
        x[:7] = honest + 1.2 * x[7:].std(dim=0)
        w = torch.full((15,), 1 / 15, dtype=torch.float64)
        for reference, more in (("median", {}), ("client", {"trusted": 9})):
            got = apply("monna", x, w, f=7, reference=reference, **more)
            errors[reference] += float((got.value - honest).norm()) / 10
    assert errors["client"] < 0.6 * errors["median"], errors
