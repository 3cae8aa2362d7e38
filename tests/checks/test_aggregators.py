"""What every registered aggregator must keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.aggregators.base import Aggregator
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import build, find
from tests.checks.aggregator_cases import EXACT, RULES, apply, updates
from tests.helpers import tiny

every_rule = pytest.mark.parametrize("name", RULES)


def those_that_keep(promise: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "name", [name for name in RULES if promise in find("aggregator", name).keeps]
    )


@every_rule
@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shapes_and_weights(name: str, n: int, dtype: torch.dtype) -> None:
    x, w = (t.to(dtype) for t in updates(n))
    before = x.clone(), w.clone()
    got = apply(name, x, w)
    assert got.value.shape == (6,) and got.value.dtype == x.dtype and got.weights.shape == (n,)
    assert torch.isfinite(got.value).all() and (got.weights >= 0).all() and 0 < got.weights.sum() < 1 + 1e-6
    assert torch.equal(x, before[0]) and torch.equal(w, before[1])  # pure


@every_rule
def test_the_order_of_clients_does_not_matter(name: str) -> None:
    x, w = updates(9)
    order = torch.tensor([3, 0, 6, 1, 8, 5, 2, 4, 7])
    for f in (0, 1):
        here, there = apply(name, x, w, f=f), apply(name, x[order], w[order], torch.arange(9)[order], f=f)
        torch.testing.assert_close(here.value, there.value, rtol=0, atol=1e-12)
        torch.testing.assert_close(here.weights[order], there.weights, rtol=0, atol=1e-12)


@every_rule
def test_of_equal_updates_the_lowest_id_counts_whatever_the_order(name: str) -> None:
    x = torch.tensor(
        [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.5, 0.5]],
        dtype=torch.float64,
    )
    w, order = torch.full((7,), 1 / 7, dtype=torch.float64), torch.tensor([5, 6, 0, 4, 2, 1, 3])
    here, there = apply(name, x, w, f=1), apply(name, x[order], w[order], order, f=1)
    torch.testing.assert_close(here.value, there.value, rtol=0, atol=1e-12)
    torch.testing.assert_close(here.weights[order], there.weights, rtol=0, atol=1e-12)


@every_rule
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_clients_that_agree_are_believed(name: str, n: int) -> None:
    x = torch.full((n, 6), 0.3, dtype=torch.float64)
    torch.testing.assert_close(
        apply(name, x, torch.full((n,), 1 / n, dtype=torch.float64), **EXACT.get(name, {})).value,
        x[0],
        rtol=0,
        atol=1e-9,
    )


@every_rule
def test_clients_that_send_nothing_change_nothing(name: str) -> None:
    x, w = torch.zeros(7, 6), torch.full((7,), 1 / 7)
    assert torch.equal(apply(name, x, w, f=1).value, x[0])


@every_rule
def test_the_same_input_gives_the_same_output(name: str) -> None:
    x, w = updates(6)
    assert torch.equal(apply(name, x, w).value, apply(name, x, w).value)


@every_rule
def test_sample_counts_matter_only_where_the_rule_says_so(name: str) -> None:
    x, w = updates(6)
    even = torch.full((6,), 1 / 6, dtype=torch.float64)
    same = torch.allclose(apply(name, x, w).value, apply(name, x, even).value)
    assert same != build("aggregator", name).uses_priors


@those_that_keep("shift")
def test_what_is_added_to_all_is_added_to_the_aggregate(name: str) -> None:
    x, w = updates(11)
    shift = Key(9).normal(6, dtype=torch.float64)
    here, there = apply(name, x, w, f=2), apply(name, x + shift, w, f=2)
    torch.testing.assert_close(here.value + shift, there.value, rtol=0, atol=1e-6)


@those_that_keep("scale")
def test_the_aggregate_grows_with_the_updates(name: str) -> None:
    x, w = updates(11)
    torch.testing.assert_close(
        apply(name, x, w, f=2).value * 4, apply(name, x * 4, w, f=2).value, rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("name", ["clustered", "fltrust", "foolsgold", "norm-bound", "centered-clip"])
def test_the_others_do_not(name: str) -> None:
    x, w = updates(11)
    rule, root = find("aggregator", name), x.mean(dim=0)
    start, shifts = apply(name, x, w, root=root, f=2).value, (40 - root, -root)
    moved = [apply(name, x + shift, w, root=root, f=2).value - shift for shift in shifts]
    assert "shift" not in rule.keeps and not all(torch.allclose(start, other) for other in moved)
    if "scale" not in rule.keeps:
        assert not torch.allclose(start * 40, apply(name, x * 40, w, root=root, f=2).value)


@those_that_keep("hull")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e6, 1e30])
@pytest.mark.parametrize("alike", [True, False])
def test_far_outliers_stay_outside(name: str, dtype: torch.dtype, size: float, alike: bool) -> None:
    x, _ = updates(11)
    signs = Key(3).fold(torch.arange(2)).uniform(6) - 0.5
    x[[4, 9]] = size * (torch.ones(6) if alike else signs).double()
    got = apply(name, x.to(dtype), torch.full((11,), 1 / 11, dtype=dtype), f=2)
    benign = x[[i for i in range(11) if i not in (4, 9)]].to(dtype)
    assert (
        not got.fallback
        and (got.value >= benign.amin(dim=0)).all()
        and (got.value <= benign.amax(dim=0)).all()
    )


@those_that_keep("hull")
def test_rounding_of_float32_does_not_change_who_is_believed(name: str) -> None:
    """A large part in common leaves few digits of the differences in a plain product of rows."""
    x, w = updates(11, 300)
    x = (x * 0.01 + 50).float()
    x[4] += 1
    here, exact = apply(name, x, w.float(), f=2), apply(name, x.double(), w, f=2)
    torch.testing.assert_close(here.weights.double(), exact.weights, rtol=0, atol=2e-2)
    torch.testing.assert_close(here.value.double(), exact.value, rtol=0, atol=1e-4)


@every_rule
def test_many_clients(name: str) -> None:
    """SMEA cannot try all choices of 450 of them, and says so. LASA would set one entry of three to 0."""
    x, w = updates(500, 3)
    got = apply(name, x, w, f=0.1, **({"sparsity": 0} if name == "lasa" else {}))
    assert got.fallback == (name == "smea") and (got.value - 1).abs().max() < 0.3


@every_rule
def test_too_small_a_cohort_falls_back_and_says_so(name: str) -> None:
    rule: Aggregator = build("aggregator", {"name": name, "f": 3})
    x, w = updates(rule.least(3))
    assert not apply(name, x, w, f=3).fallback
    if rule.least(3) > 1:
        got = apply(name, x[:-1], w[:-1] / w[:-1].sum(), f=3)
        torch.testing.assert_close(got.value, x[:-1].quantile(0.5, dim=0))
        assert got.fallback


@every_rule
def test_a_setting_that_never_holds_is_refused(name: str) -> None:
    rule = build("aggregator", name)
    if rule.least(1) == rule.least(3):  # what it needs does not depend on f
        assert build("aggregator", {"name": name, "f": 0.5}).enough(rule.least(1))
        return
    with pytest.raises(
        ConfigError, match=f"aggregator: {name} needs n >.*, which no cohort meets with f = 0.5; lower it"
    ):
        build("aggregator", {"name": name, "f": 0.5})
    config = tiny(aggregator={"name": name, "f": 4})
    with pytest.raises(
        ConfigError,
        match=f"'{name}' needs n >.* but a cohort has n = 5 clients with f = 4; lower aggregator.f",
    ):
        config.parts()


@every_rule
def test_the_documentation_states_its_condition(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "aggregators.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    assert len(rows) == 1 and rows[0][3].strip() == build("aggregator", name).condition


@every_rule
def test_half_a_client_is_no_number_of_them(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"aggregator.f: a number of clients is whole, and a share of them is below 1 \(got 1.5\)",
    ):
        build("aggregator", {"name": name, "f": 1.5})
    assert build("aggregator", {"name": name, "f": 1.0}).assumed(9) == 1


@every_rule
def test_without_f_a_rule_that_leaves_out_f_would_quietly_be_the_mean(name: str) -> None:
    x, w = updates(9)
    x[3] *= 50
    rule, plain = build("aggregator", name), x.mean(dim=0)
    same = rule.name != "mean" and torch.allclose(apply(name, x, w).value, plain)
    assert rule.idle() == same
    if same:
        with pytest.raises(
            ConfigError, match=f"'{name}' needs f, the share .* set aggregator.f, for example 0.2"
        ):
            tiny(aggregator=name, data={"clients": 9}).parts()
        with pytest.raises(ConfigError, match=rf"'clip\({name}\)' needs f, the share"):
            tiny(aggregator={"name": name, "wrap": ["clip"]}, data={"clients": 9}).parts()
        assert tiny(aggregator={"name": name, "f": 0}, data={"clients": 9}).parts()
