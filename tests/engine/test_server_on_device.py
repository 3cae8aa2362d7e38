"""Servers, attacks and screening on a device of their own: the pretended GPU refuses to mix its tensors with
the host's, and counts what crosses. Clients train on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.attacks.base import View
from holdfast.attacks.lie import Lie
from holdfast.core import together as core_together
from holdfast.core.keys import Key
from holdfast.core.types import Round, Schema, State, Steps, Uplink
from holdfast.detectors.base import Detector, Judgement
from holdfast.engine.client_stack import ClientStack
from holdfast.engine.replies import Replies
from holdfast.engine.run_context import Call
from holdfast.engine.simulator import Simulator
from holdfast.experiment import runner
from holdfast.forecast.short_rounds import ShortRoundEngine
from holdfast.local.plan import Plan
from holdfast.methods import fedgc
from holdfast.methods.averaging import Averaging
from holdfast.methods.context import Context
from holdfast.methods.fedavg import FedAvg
from holdfast.results.run import Run
from holdfast.server_optimizers.base import ServerOptimizer, Step
from holdfast.storage.host_copy import HostCopy
from holdfast.sweeps.session import resume, start
from tests.attacks import searched_trigger  # noqa: F401  # registers its attacks
from tests.checks.method_cases import hard
from tests.helpers import (
    NORMALISED,
    assert_same,
    built_in,
    everything,
    methods_in_turn,
    run_all,
    some_now,
    tiny,
)
from tests.pretended_gpu import PretendedGpu, pretended_gpu


@contextmanager
def servers_on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGpu]:
    """Within, servers compute on the pretended GPU. What clients do, and what is saved, is not counted."""
    with pretended_gpu() as gpu, monkeypatch.context() as patch:

        def uncounted(of: Any, name: str) -> None:
            work = getattr(of, name)

            def quietly(*args: Any, **kwargs: Any) -> Any:
                with gpu.not_counted():
                    return work(*args, **kwargs)

            patch.setattr(of, name, quietly)

        def corrected_on_host(rows: Tensor, held: Tensor, alike: bool) -> Tensor:
            with gpu.not_counted():  # autograd does not run on the pretended GPU
                return correction(rows.cpu(), held.cpu(), alike).to(gpu.device)

        correction = fedgc.correction
        patch.setattr(fedgc, "correction", corrected_on_host)
        uncounted(ClientStack, "perform")
        uncounted(HostCopy, "__init__")
        patch.setattr(runner, "home_of", lambda plan, device: gpu.device)
        yield gpu


def case(name: str, **settings: Any) -> dict[str, Any]:
    return hard(
        name,
        method={"name": name, **settings},
        attack={"name": "sign-flip", "fraction": 0.3},
        engine={"plan": "vmap"},
    )


TOGETHER: dict[str, set[str]] = {
    "fedcap": {"Lengths", "Reduction", "Cosines", "Mixture", "Sound"},
    "fedamp": {"Distances", "Mixture"},
    "fedpac": {"Lengths", "Reduction", "Mixture"},
    "c-pfl": set(),
}
"""What the server halves of two experiments are seen to compute together, if not what all others do. In one
of C-PFL's, more members of the committee would have trained."""
MODEL = 8 * 470
"""Bytes of the network, about."""
CASES = {name: case(name) for name in built_in("method")} | {
    "fedcap, customised reference": case("fedcap", reference="customised", similarity="head"),
    "fedcap, authors": case("fedcap", variant="authors", phi="uniform"),
    "fedcom, gradient": case("fedcom", signal="gradient", order="sequential"),
    "fedas, authors": case("fedas", variant="authors"),
    "c-pfl, previous": case("c-pfl", missing_mass="previous"),
    "clustered-fl, cuts": case("clustered-fl", eps1=10.0, eps2=0.0, across=1.0) | {"data": {"clients": 8}},
    "fedcap, nobody answers": case("fedcap") | {"train": {"rounds": 4, "dropout": 0.8}},
    "fedfomo, nobody answers": case("fedfomo") | {"train": {"rounds": 4, "dropout": 0.7}},
    "c-pfl, nobody answers": case("c-pfl") | {"train": {"rounds": 4, "participation": 0.6, "dropout": 0.8}},
}


@pytest.mark.parametrize("name", some_now(CASES, every=3))
def test_every_method_gives_the_same_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = run_all([CASES[name]], tmp_path / "host")[0]
    with servers_on_device(monkeypatch) as gpu:
        here = run_all([CASES[name]], tmp_path / "device")[0]
    assert_same(everything(there), everything(here), 1e-10)
    assert gpu.started and gpu.largest_read < MODEL, "a whole model came to the host"


@pytest.mark.parametrize("name", methods_in_turn())
def test_every_method_gives_several_experiments_the_numbers_of_each_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the device, with other data and rates in each; alone on the host."""
    short = {"rounds": 2, "local_epochs": 1, "participation": 0.8}
    tables = [
        case(name) | {"seed": 1, "train": short},
        case(name) | {"seed": 2, "train": {**short, "lr": 0.05, "momentum": 0.5}},
    ]
    alone = [run_all([table], tmp_path / f"alone{place}")[0] for place, table in enumerate(tables)]
    made, together = Counter[str](), core_together._together

    def noted(computations: list[Any]) -> Any:
        made[type(computations[0]).__name__] += 1
        found = together(computations)
        assert not isinstance(found, Exception)
        return found

    monkeypatch.setattr(core_together, "_together", noted)
    with servers_on_device(monkeypatch):
        here = run_all(tables, tmp_path / "together")
    for one, other in zip(alone, here, strict=True):
        assert_same(everything(one), everything(other), 1e-10)
    usual = {"Lengths", "Reduction"} if built_in("method")[name].reduces else set()
    assert TOGETHER.get(name, usual) <= made.keys()


def test_every_server_optimiser_gives_several_experiments_the_numbers_of_each_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the device, with other data and rates in each, all in one stack; alone on the host."""
    one: dict[str, Any] = {"model": NORMALISED, "train": {"rounds": 2, "participation": 0.8}}
    tables = [
        one | {"server": {"name": name, "lr": 0.1 * (1 + place)}, "seed": place}
        for place, name in enumerate([*built_in("server"), "fedadam"])
    ]
    with servers_on_device(monkeypatch) as gpu:
        here = run_all(tables, tmp_path / "together")
    assert gpu.started and gpu.largest_read < MODEL, "a whole model came to the host"
    for place, table in enumerate(tables):
        alone = run_all([table], tmp_path / f"alone{place}")[0]
        assert_same(everything(alone), everything(here[place]), 1e-10)
        assert any(name.startswith("server/optimizer/") for name in everything(alone))


def test_experiments_are_attacked_screened_and_aggregated_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four experiments start hardly more operations on the device than one does, and read hardly more
    often."""
    started, reads = [], []
    tables = [
        case("ditto")
        | {
            "seed": seed,
            "attack": {"name": "lie", "fraction": 0.3},
            "aggregator": {"name": "multi-krum", "f": 1, "wrap": ["clip"]},
            "data": {"clients": 8},
        }
        for seed in range(4)
    ]
    there = run_all(tables, tmp_path / "host")
    for count in (1, 4):
        with servers_on_device(monkeypatch) as gpu:
            here = run_all(tables[:count], tmp_path / f"device{count}")
        for one, other in zip(there, here, strict=False):
            assert_same(everything(one), everything(other), 1e-10)
        started.append(sum(gpu.started.values()))
        reads.append(gpu.reads)
    assert started[1] < 2 * started[0] and reads[1] < 2 * reads[0]


def test_attackers_train_by_themselves_and_remember(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they remember is on the device, and there again after a resume."""
    attacks = [{"name": "neurotoxin", "radius": 1.0}, {"name": "searched-trigger"}]
    tables = [
        case("fedavg") | {"attack": {"fraction": 0.3, **attack}, "train": {"rounds": 3}} for attack in attacks
    ]
    there = run_all(tables, tmp_path / "host")
    with servers_on_device(monkeypatch) as gpu:
        short = [table | {"train": {"rounds": 2}} for table in tables]
        begun = run_all(short, tmp_path / "device")
        resume(tmp_path / "device", rounds=3)
        for run, one in zip(begun, there, strict=True):
            assert_same(everything(one), everything(Run(run.path, one.config)), 1e-10)
        assert gpu.started
    assert "attack/all/sent" in everything(there[0])


class OwnRule(Aggregator):
    """As a user would write it, for tensors of the host."""

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        seen = state.get("seen", torch.zeros(1)) + 1
        return Reduced(torch.from_numpy((x.numpy() * w.numpy()[:, None]).sum(0)), w, {"seen": seen})


class OwnLie(Lie):
    """Changes an attack of Holdfast, and says nothing of devices."""

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        return {"update": view.known("update").mean(0) * torch.full((1,), 3.0, dtype=torch.float64)}


class OwnDetector(Detector):
    def judge(self, state: State, ctx: Any, models: Tensor, ids: Tensor) -> Steps[Judgement]:
        sent = torch.cat([ctx.reference, ctx.buffers[0]])
        up = yield replace(ctx.ask("train", sent, ids[:1]), discard_state=True)
        models = models + 0 * up["update"]
        change = models - ctx.reference + 0 * ctx.initial[: models.shape[1]]
        far = change[:, ctx.head].numpy().std(1)
        return Judgement(state, {}, {"far": torch.from_numpy(far)})


class OwnOptimizer(ServerOptimizer):
    def step(self, aggregate: Tensor, state: State) -> Step:
        before = state.get("before", torch.zeros(len(aggregate), dtype=torch.float64))
        return Step(aggregate + 0.5 * before, {"before": aggregate})


class OwnServer(Averaging):
    """It would mix tensors of the host and the device."""

    def round(self, state: State, ctx: Context) -> Round:
        state, verdict = yield from super().round(state, ctx)
        return state | {"model": state["model"] + torch.zeros(ctx.wire.size)}, verdict


class OwnMethod(FedAvg):
    Server = OwnServer


OWN = {
    "parts": {
        "aggregator": OwnRule(),
        "attack": OwnLie(fraction=0.3),
        "detectors": [OwnDetector()],
        "server": OwnOptimizer(),
    },
    "method": {"aggregator": {"name": "median"}, "attack": OwnLie(fraction=0.3), "method": OwnMethod()},
}


@pytest.mark.parametrize("own", list(OWN))
def test_parts_of_a_user_are_handed_tensors_of_the_host(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = [hard("ditto", engine={"plan": "vmap"}) | OWN[own] | {"seed": seed} for seed in (0, 1)]
    there = run_all(tables, tmp_path / "host")
    with servers_on_device(monkeypatch):
        here = run_all(tables, tmp_path / "device")
    for one, other in zip(there, here, strict=True):
        assert_same(everything(one), everything(other), 1e-10)


class Other:
    """An engine that says nothing of devices, as that of a federation, whose nodes send tensors of the
    host."""

    def __init__(self, plans: Mapping[str, Plan], device: torch.device):
        self.inner = Simulator(plans, device)

    def exchange(self, calls: Sequence[Call]) -> list[Uplink]:
        ups = self.inner.exchange(calls)
        assert all(value.device.type == "cpu" for up in ups for value in up.fields.values())
        assert all(call.exchange.bank.device.type == "cpu" for call in calls)
        return ups

    def close(self) -> None:
        self.inner.close()


def test_servers_compute_on_the_host_where_the_engine_says_nothing_of_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with servers_on_device(monkeypatch) as gpu:
        start([("", tiny(**CASES["fedcap"]))], tmp_path / "run", engine=Other)
    assert not gpu.started


def test_attackers_never_write_into_the_models_that_clients_were_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that changes nothing may hand back rows of the bank, or one row for all."""
    monkeypatch.setattr(Replies, "_stays", lambda self, name: True)
    bank = torch.zeros(1, 3)
    for clients in (1, 2):
        asked: Any = SimpleNamespace(exchange=SimpleNamespace(to=torch.arange(clients), bank=bank))
        replies = Replies([asked], {}, torch.device("cpu"), None)
        replies.take({"buffers": bank.expand(clients, -1)[:, 1:]})
        replies.of(0)["buffers"][0] = 1.0
        assert replies.of(0)["buffers"].sum() == 2 and not bank.any()


def test_a_forecast_keeps_private_rows_where_the_run_does() -> None:
    with pretended_gpu() as gpu:
        assert type(ShortRoundEngine({}, gpu.device)._rows) is type(Simulator({}, gpu.device)._rows)
