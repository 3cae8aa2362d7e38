"""What every registered attack must keep: benign clients are left alone, and neither plan, company nor a
pause changes anything."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.attacks import Adversary
from holdfast.core.errors import ConfigError
from holdfast.core.registry import describe, find
from holdfast.core.types import ROOT, Schema, Uplink
from holdfast.engine.simulator import Simulator
from holdfast.results.run import Run
from holdfast.sweeps import session
from tests.checks.attack_cases import QUICK
from tests.helpers import assert_same, built_in, everything, methods_in_turn, tiny

ATTACKS = list(built_in("attack"))
every_attack = pytest.mark.parametrize("name", ATTACKS)
HARD: list[dict[str, Any]] = [
    {"name": "backdoor", "size": 3, "fraction": 0.4},
    {"name": "input-noise", "fraction": 0.4, "redraw": True},
    {
        "name": "label-flip",
        "fraction": 0.4,
        "flip": "random",
        "ratio": 0.7,
        "skew": 0.25,
        "fresh": True,
        "redraw": True,
    },
    {"name": "lie", "fraction": 0.6, "redraw": True, "lies": {"count": 3.0}},
    {"name": "gaussian", "fraction": 0.4, "scale": "model"},
]
REMEMBERS: dict[str, Any] = {"name": "poisoned-fl", "fraction": 0.4, "every": 1}
hard = pytest.mark.parametrize("attack", HARD, ids=[attack["name"] for attack in HARD])


def table(attack: dict[str, Any], **changes: Any) -> dict[str, Any]:
    given = {"method": "ditto", "attack": attack, "train": {"rounds": 3, "participation": 0.8}}
    return {
        name: (
            {**given.get(name, {}), **changes[name]}
            if isinstance(changes.get(name), dict)
            else changes.get(name, given.get(name))
        )
        for name in {**given, **changes}
    }


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Checks every reply before and after attackers have changed it; returns how many malicious replies each
    exchange had, by attack."""
    count: dict[str, list[int]] = {}
    honest_poisoning = Adversary.poisoning

    def poisoning(
        self: Adversary,
        task: str,
        schema: Schema,
        up: Uplink,
        key: Any,
        round: int = 0,
        sent: Any = None,
        in_place: bool = False,
        trained: Uplink | None = None,
    ) -> Generator[Any, Any, Uplink]:
        before = {name: value.clone() for name, value in up.fields.items()}
        after = yield from honest_poisoning(self, task, schema, up, key, round, sent, in_place, trained)
        benign = self.benign(up.ids, round) | (up.ids == ROOT)
        assert torch.equal(after.ids, up.ids) and after.fields.keys() == before.keys()
        assert self.attack is not None
        count.setdefault(self.attack.name, []).append(int((~benign).sum()))
        for name, value in before.items():
            assert in_place or torch.equal(up[name], value), "honest replies are read, not written"
            assert torch.equal(after[name][benign], value[benign])
            if schema[name].kind not in self.attack.kinds and name not in self.attack.features_in(schema):
                assert torch.equal(after[name], value), f"{name} is not of a declared kind"
        return after

    monkeypatch.setattr(Adversary, "poisoning", poisoning)
    return count


def measured(run: Run) -> list[str]:
    """The models that the run evaluated."""
    return [
        model for model in ("global", "customised", "personal") if run.final[f"accuracy/{model}"] is not None
    ]


@pytest.mark.parametrize("method", methods_in_turn(often=("fedavg", "fedcap")))
def test_every_attack_on_every_method(
    method: str, simulate_all: Callable[..., list[Run]], watched: dict[str, list[int]]
) -> None:
    """All attacks in one start: who is malicious, and what is done to replies, is each experiment's own."""
    # a client that is banned attacks only once
    lenient = {"detect": False} if "detect" in built_in("method")[method].model_fields else {}
    settings = {"backdoor": {"size": 3}, **QUICK}
    tables = [
        {
            "method": {"name": method, **lenient},
            "attack": {"name": name, "fraction": 0.4, **settings.get(name, {})},
        }
        for name in ATTACKS
    ]
    for name, run in zip(ATTACKS, simulate_all(tables), strict=True):
        assert run.round in (2, 3) and len(run.manifest["malicious"]) == 2, name
        assert sum(watched[name]) >= 4, f"{name}: malicious replies"
        assert run.final["accuracy"] is not None, name
        assert run.final["detection/fnr"] == 1.0 and run.final["detection/rounds"] is None, name
        if name != "edge-case":  # so few clients may have no rare sample to test on
            planted = bool({"target", "poison"} & set(built_in("attack")[name].model_fields))
            assert (run.final["attack/asr"] is None) != planted, name
            assert all((run.final.get(f"attack/asr/{m}") is not None) == planted for m in measured(run)), name


@every_attack
def test_it_says_what_it_is(name: str) -> None:
    about = describe(find("attack", name))
    assert about["summary"].endswith(".") and all(setting["help"] for setting in about["settings"])


@hard
def test_loop_equals_vmap(attack: dict[str, Any], simulate: Callable[..., Run]) -> None:
    loop, vmap = (everything(simulate(**table(attack, engine={"plan": plan}))) for plan in ("loop", "vmap"))
    assert_same(loop, vmap, 1e-9)


@hard
def test_workers_change_nothing(attack: dict[str, Any], simulate: Callable[..., Run]) -> None:
    """They were forked before the round whose data they train on."""
    alone, shared = (
        everything(simulate(**table(attack, engine={"plan": "loop", "workers": n, "threads": None})))
        for n in (1, 2)
    )
    assert_same(alone, shared, 1e-10)


def test_fused_equals_alone(simulate: Callable[..., Run], simulate_all: Callable[..., list[Run]]) -> None:
    tables = [
        *(table(attack, seed=place) for place, attack in enumerate(HARD)),
        table({"name": "ipm"}),
        table(HARD[3], seed=9),
    ]
    tables.append(table(HARD[0], seed=0, aggregator="median"))  # shares its sample store with the first
    for each, fused in zip(tables, simulate_all(tables), strict=True):
        alone = simulate(**each)
        assert_same(everything(fused), everything(alone), 1e-9)
        assert fused.store.parts(3)[1]["attack"] == alone.store.parts(3)[1]["attack"]


@pytest.mark.parametrize("attack", [*HARD, REMEMBERS], ids=[attack["name"] for attack in (*HARD, REMEMBERS)])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    attack: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_disk: None
) -> None:
    config = tiny(**table(attack, engine={"plan": "loop"}))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    session.start([("", config)], whole)
    exchange = Simulator.exchange

    def stop(self: Simulator, calls: Any) -> Any:
        if calls[0].run_context.round == 3:
            raise KeyboardInterrupt
        return exchange(self, calls)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Simulator, "exchange", stop)
        session.start([("", config)], cut)
    session.resume(cut)
    first, second = Run(whole, config), Run(cut, config)
    a, b = everything(first), everything(second)
    assert a.keys() == b.keys() and all(
        torch.equal(torch.nan_to_num(a[k]), torch.nan_to_num(b[k])) for k in a
    )
    strip = [{k: v for k, v in run.final.items() if not k.startswith("seconds/")} for run in (first, second)]
    assert strip[0] == strip[1] and first.store.parts(3)[2]["attack"] == second.store.parts(3)[2]["attack"]


def test_a_redrawn_set_in_a_run(simulate: Callable[..., Run], watched: dict[str, list[int]]) -> None:
    """Who is malicious is written down per round, clients count as benign by the round, and the clamp is
    reported."""
    run = simulate(
        **table({"name": "lie", "fraction": 0.6, "redraw": True}, train={"rounds": 6, "participation": 1.0})
    )
    sets = [run.store.arrays(round)["malicious"].tolist() for round in range(1, 7)]
    assert all(len(drawn) == 3 for drawn in sets) and len(set(map(tuple, sets))) > 1
    assert watched == {"lie": [3] * 6}
    assert run.manifest["malicious"] == "redrawn every round"
    assert run.malicious() == sets[-1] and run.malicious(2) == sets[1]
    with pytest.raises(ConfigError, match="there is no round 7"):
        run.malicious(7)
    last = run.store.arrays(6)
    benign = ~torch.isin(last["evaluate/ids"], last["malicious"]) & (last["evaluate/test/total"] > 0)
    mean = (last["evaluate/test/personal/correct"] / last["evaluate/test/total"])[benign].mean()
    assert run.final["accuracy"] == pytest.approx(float(mean))
    assert run.store.parts(1)[0]["attack"] == ["lie: z = inf for 3 attackers among 5 clients, clamped to 3"]
    assert run.final["attack/noted_rounds"] == 6 and run.final["detection/dacc"] == pytest.approx(0.4)
    assert 0 <= run.final["detection/auc/weights"] <= 1
