from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.aggregators.mean import Mean
from holdfast.core.errors import ConfigError
from holdfast.core.flat import Layout
from holdfast.core.types import State
from holdfast.experiment.config import make_config
from holdfast.results.run import Run, name_of
from holdfast.wrappers import Around
from holdfast.wrappers.bucketing import Bucketing
from holdfast.wrappers.clip import Clip
from holdfast.wrappers.gas import GradientSplitting
from holdfast.wrappers.nnm import NearestNeighbourMixing
from tests.checks.aggregator_cases import context_of


class Remembering(Aggregator):
    """The mean, with what it says about its memory."""

    about: str = "clients"

    def init(self, layout: Layout) -> State:
        return {"calls": torch.zeros(())}

    def remembers(self) -> str:
        return self.about

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        return Reduced(w @ x, w, {"calls": state["calls"] + 1})


def test_the_rule_inside_keeps_its_memory() -> None:
    rule = Clip()(NearestNeighbourMixing(f=1)(Remembering()))
    x = torch.ones(3, 2)
    ctx, w = context_of(x), torch.full((3,), 1 / 3)
    first = rule(x, w, rule.init(ctx.layout), ctx)
    assert (
        first.state["calls"] == 1
        and rule(x, w, first.state, ctx).state["calls"] == 2
        and rule.remembers() == "clients"
    )


def test_a_memory_that_a_wrapper_would_mix_up_is_refused() -> None:
    with pytest.raises(ConfigError, match="remembers every client, but every round has other buckets"):
        Bucketing()(Remembering())
    assert Bucketing()(Remembering(about="model")).remembers() == "model"
    for about in ("clients", "model"):
        with pytest.raises(
            ConfigError, match="keeps a memory, but the groups of 'gas' are others in every round"
        ):
            GradientSplitting()(Remembering(about=about, f=1))
    with pytest.raises(ConfigError, match="remembers every client"):
        Bucketing()(Clip()(Remembering()))


@pytest.mark.parametrize("wrapper", [GradientSplitting(), NearestNeighbourMixing()])
def test_wrappers_that_leave_out_f_clients_require_an_f(wrapper: Around) -> None:
    with pytest.raises(
        ConfigError, match=f"wrapper '{wrapper.name}' needs f, .*; set aggregator.f, for example 0.3"
    ):
        wrapper(Mean())
    assert wrapper(Mean(f=0)).assumed(5) == 0
    assert NearestNeighbourMixing(f=2)(Mean()).f is None


def test_a_wrapper_must_say_how_it_reduces() -> None:
    class Empty(Around):
        """Nothing here."""

    x = torch.ones(1, 1)
    with pytest.raises(TypeError, match="Empty does not define how it reduces"):
        Empty()(Mean())(x, torch.ones(1), {}, context_of(x))


def test_an_object_is_written_down_as_a_config_would_spell_it() -> None:
    wrap = [
        {"name": "bucketing", "s": 3, "variant": "paper"},
        {"name": "clip", "norm": 2.0, "unit": "median"},
    ]
    table = {"name": "mean", "weights": "uniform", "f": 1.0, "wrap": wrap}
    rule = Clip(norm=2.0)(Bucketing(s=3)(Mean(weights="uniform", f=1)))
    assert make_config({"aggregator": rule}).plain()["aggregator"] == table
    assert make_config({"aggregator": table}).parts().aggregator == rule
    assert (
        name_of(table) == rule.name == "clip(bucketing(mean))"
        and name_of({"name": "mean", "wrap": ["gas"]}) == "gas(mean)"
    )
    assert make_config({"aggregator": Clip()(Remembering())}).plain()["aggregator"] == "<Remembering>"


def test_a_run_with_all_of_them(simulate: Callable[..., Run]) -> None:
    wrap = ["clip", {"name": "nnm", "f": 1}, "bucketing", {"name": "gas", "p": 7}]
    run = simulate(aggregator={"name": "mean", "f": 1, "wrap": wrap})
    weights = run.store.arrays(1)["verdict/weights"]
    assert sorted(weights.tolist()) == [0.0, 0.25, 0.25, 0.25, 0.25]  # of five clients, gas averages four
    part = run.store.read_json("parts/000001.json")
    assert part is not None and "gas(bucketing(nnm(clip(mean)))) ignores sample counts" in part["notes"]
