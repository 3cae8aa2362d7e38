"""Whatever can differ between two experiments that are trained together has an effect in its own one only:
every setting of every method, and parts as a new user would write them. A cell of a sweep equals its run
alone, or the mistake is named."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

import pytest
import torch

import holdfast
from holdfast.core.errors import RunError, SettingError
from holdfast.core.registry import find
from holdfast.local.function_identity import identity
from holdfast.results.run import Run
from tests.checks import naive_plugins as naive
from tests.helpers import assert_same, everything, methods_in_turn

# our own methods keep a row for each client in all they do
pytestmark = pytest.mark.filterwarnings("error:.*trained one by one:RuntimeWarning")
All = Callable[..., list[Run]]
One = Callable[..., Run]
SMALL: dict[str, Any] = {
    "train": {"rounds": 2, "local_epochs": 1, "participation": 0.8},
    "data": {"clients": 4},
}
NEEDED: dict[str, dict[str, Any]] = {
    "fedfomo": {"data": {"clients": 4, "split": {"train": 0.5, "validation": 0.25, "test": 0.25}}}
}


def other_values(method: str) -> list[dict[str, Any]]:
    """For each setting, a config with another value of it than the default."""
    out = []
    for name, field in find("method", method).model_fields.items():
        usual, choices = field.get_default(), _choices(field.annotation)
        if usual is None and "float" in str(field.annotation):
            out += [{name: 1.0}, {name: 3.0}]
        elif isinstance(usual, bool):
            out.append({name: not usual})
        elif choices:
            out += [{name: choice} for choice in choices if choice != usual]
        elif isinstance(usual, float):
            out.append({name: usual / 2 if usual else 0.5})
        elif isinstance(usual, int):
            out.append({name: usual + 1})
    return out


def _choices(kind: Any) -> list[Any]:
    inner = [get_args(one) for one in (kind, *get_args(kind)) if get_origin(one) is Literal]
    return [choice for choices in inner for choice in choices]


def check(tables: list[dict[str, Any]], simulate: One, simulate_all: All) -> list[Run]:
    together = simulate_all(tables)
    for table, fused in zip(tables, together, strict=True):
        assert_same(everything(fused), everything(simulate(**table)), 1e-10)
    return together


@pytest.mark.parametrize("name", methods_in_turn(often=("fedavg", "ditto", "fedcap")))
def test_a_sweep_over_each_setting_gives_each_cell_its_own_run(
    name: str, simulate: One, simulate_all: All
) -> None:
    needed = {**SMALL, **NEEDED.get(name, {})}
    check(
        [{**needed, "method": {"name": name, **change}} for change in [{}, *other_values(name)]],
        simulate,
        simulate_all,
    )


@pytest.mark.parametrize("client", naive.RIGHT, ids=lambda client: client.__name__)
def test_a_users_method_that_reads_rows_is_swept_rightly(
    client: Any, simulate: One, simulate_all: All
) -> None:
    method = naive.method_of(client)
    low, high = check([{**SMALL, "method": method(lam=lam)} for lam in (0.0, 5.0)], simulate, simulate_all)
    assert not torch.allclose(low.vector(), high.vector())


@pytest.mark.parametrize("client", naive.APART, ids=lambda client: client.__name__)
def test_a_users_method_that_reads_one_value_for_all_is_trained_apart(
    client: Any, simulate: One, simulate_all: All
) -> None:
    method = naive.method_of(client)
    tables = [{**SMALL, "method": method(lam=lam)} for lam in (0.0, 5.0)]
    with pytest.warns(
        RuntimeWarning,
        match=r"naive_plugins.py, line \d+: local.settings.lam is read as one value for all clients",
    ):
        low, high = simulate_all(tables)
    for table, swept in zip(tables, (low, high), strict=True):
        assert_same(everything(swept), everything(simulate(**table)), 0)
    assert not torch.allclose(low.vector(), high.vector())


@pytest.mark.parametrize("plan", ["vmap", "loop", "captured-loop"])
def test_a_loss_that_closes_over_a_setting_is_trained_apart(
    plan: str, simulate: One, simulate_all: All
) -> None:
    """One client in each of two cells, and batches of two."""
    method, engine = naive.method_of(naive.Enclosed), {"plan": plan, "threads": 1}
    one = {
        "data": {"clients": 1, "partition": {"name": "iid", "samples_per_client": 8}},
        "train": {"rounds": 1, "batch_size": 2},
    }
    tables = [{**one, "engine": engine, "method": method(lam=lam)} for lam in (0.0, 5.0)]
    with pytest.warns(RuntimeWarning, match="hand it to a loss by aux"):
        swept = simulate_all(tables)
    for table, run in zip(tables, swept, strict=True):
        assert_same(everything(run), everything(simulate(**table)), 0)


@pytest.mark.parametrize("client", naive.WRONG, ids=lambda client: client.__name__)
def test_a_users_method_that_reads_one_value_for_all_is_refused(
    client: Any, simulate: One, simulate_all: All
) -> None:
    method = naive.method_of(client)
    with pytest.raises(SettingError, match=r"naive_plugins.py, line \d+: .*local.settings.lam"):
        simulate(**SMALL, method=method(lam=0.5))  # alone too, so that it is noticed before the first sweep
    with pytest.raises(RunError, match="local.settings.lam"):
        simulate_all([{**SMALL, "method": method(lam=lam)} for lam in (0.0, 5.0)])


@pytest.mark.parametrize("client", [naive.FromMethod, naive.FromInit, naive.FromProperty, naive.InTheLoss])
def test_a_static_setting_is_one_number_and_separates(client: Any, simulate: One, simulate_all: All) -> None:
    method = naive.method_of(client, static=True)
    low, high = check([{**SMALL, "method": method(lam=lam)} for lam in (0.0, 5.0)], simulate, simulate_all)
    assert not torch.allclose(low.vector(), high.vector())


@pytest.mark.parametrize(
    "values",
    [
        {"train": [{"loss": naive.Smoothed(0.0)}, {"loss": naive.Smoothed(0.6)}]},
        {"train": [{"loss": naive.Smoothed(0.0).value}, {"loss": naive.Smoothed(0.6).value}]},
        {"train": [{"loss": naive.smoothed(0.0)}, {"loss": naive.smoothed(0.6)}]},
        {"train": [{"loss": functools.partial(naive.Smoothed(s))} for s in (0.0, 0.6)]},
        {"model": [holdfast.Model(lambda: naive.Scaled(1.0)), holdfast.Model(lambda: naive.Scaled(3.0))]},
        {"model": [naive.part_of(1.0), naive.part_of(3.0)]},
        {"model": [naive.Scaling(scales=[naive.Unequal(1.0)]), naive.Scaling(scales=[naive.Unequal(3.0)])]},
        {"train": [{"loss": naive.Unequal(0.0)}, {"loss": naive.Unequal(0.6)}]},
        {
            "train": [
                {"loss": naive.LossPart(inner=naive.Unequal(0.0))},
                {"loss": naive.LossPart(inner=naive.Unequal(0.6))},
            ]
        },
        {"train": [{"loss": naive.private(0.0)}, {"loss": naive.private(0.6)}]},
        {"model": [{"name": "mlp", "dropout": 0.1}, {"name": "mlp", "dropout": 0.7}]},
        {"method": [naive.method_of(naive.ByRow)(lam=1.0), naive.method_of(naive.ByArithmetic)(lam=1.0)]},
        {"aggregator": ["mean", "median"]},
    ],
    ids=[
        "dataclass loss",
        "bound loss",
        "closure loss",
        "partial loss",
        "models",
        "networks",
        "hidden setting",
        "equal loss",
        "part of a part",
        "private number",
        "dropout",
        "methods",
        "aggregators",
    ],
)
@pytest.mark.parametrize("plan", ["vmap", "captured-loop"])
def test_objects_and_closures_are_used_by_their_own_cell(
    values: dict[str, list[Any]], plan: str, simulate: One, simulate_all: All
) -> None:
    ((section, choices),) = values.items()
    tables = [
        {**SMALL, "engine": {"plan": plan, "threads": 1}, section: _with(section, choice)}
        for choice in choices
    ]
    low, high = check(tables, simulate, simulate_all)
    assert not torch.allclose(low.vector(), high.vector())


def _with(section: str, choice: Any) -> Any:
    return {**SMALL["train"], **choice} if section == "train" else choice


def test_plain_settings_are_compared_with_their_types() -> None:
    assert len({identity(value) for value in (True, 1, 1.0, "1", None, (1,), [1], {"a": 1}, {"a": 1.0})}) == 9
    assert identity({"a": [1, {2: 3}], "b": None}) == identity({"b": None, "a": [1, {2: 3}]})
    assert identity(naive.Smoothed(0.1)) != identity(
        naive.Smoothed(0.1)
    )  # two objects that may keep something
