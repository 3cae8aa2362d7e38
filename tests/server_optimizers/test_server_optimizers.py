"""Server optimisers: two rounds by hand each, and what they do in whole runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.errors import ConfigError
from holdfast.core.generators import run_to_end
from holdfast.core.keys import Key
from holdfast.core.registry import build, find
from holdfast.core.together import computed_alone
from holdfast.core.types import State
from holdfast.experiment.runner import RunCallbacks
from holdfast.methods.averaging import Averaging
from holdfast.results.run import Run
from holdfast.server_optimizers.base import ServerOptimizer
from holdfast.sweeps import session
from tests.helpers import NORMALISED, assert_same, built_in, everything, tiny
from tests.methods.by_hand import W, answer, close, context
from tests.pretended_gpu import pretended_gpu

FIRST, SECOND = [0.3, -0.4], [-0.1, 0.2]  # the means of the two rounds' updates
One, All = Callable[..., Run], Callable[..., list[Run]]


def rounds_of(server: Mapping[str, Any]) -> list[State]:
    """FedAvg's server half from w = (1, 2): the state after each of two rounds, in which two clients of equal
    weight send FIRST and SECOND on average."""
    rule, out = Averaging(build("method", "fedavg")), [{"model": W}]
    for mean in (FIRST, SECOND):
        replies = answer([4, 7], [[mean[0] + 0.1, mean[1]], [mean[0] - 0.1, mean[1]]], [1.0, 1.0])
        steps = rule.round(out[-1], context(server=build("server", server)))
        out.append(run_to_end(computed_alone(steps), lambda asked, up=replies: up)[0])
    return out[1:]


def test_fedavgm_by_hand() -> None:
    """m = (0.3, -0.4), then 0.9 m + (-0.1, 0.2) = (0.17, -0.16)."""
    one, two = rounds_of({"name": "fedavgm", "lr": 0.5})
    close(one["model"], [1.15, 1.8])
    close(two["optimizer/m"], [0.17, -0.16])
    close(two["model"], [1.15 + 0.085, 1.8 - 0.08])


def test_fedadagrad_by_hand() -> None:
    """v = 0.01 + (0.09, 0.16), then + (0.01, 0.04); no momentum."""
    one, two = rounds_of({"name": "fedadagrad", "lr": 0.1, "tau": 0.1})
    close(one["model"], first := [1 + 0.03 / (sqrt(0.1) + 0.1), 2 - 0.04 / (sqrt(0.17) + 0.1)])
    close(two["optimizer/v"], [0.11, 0.21])
    close(two["model"], [first[0] - 0.01 / (sqrt(0.11) + 0.1), first[1] + 0.02 / (sqrt(0.21) + 0.1)])


def test_fedadam_by_hand() -> None:
    """m = 0.1 (0.3, -0.4), then 0.9 m + 0.1 (-0.1, 0.2) = (0.017, -0.016). v = 0.99 * 0.01 + 0.01 (0.09,
    0.16) = (0.0108, 0.0115), then 0.99 v + 0.01 (0.01, 0.04) = (0.010792, 0.011785). No bias correction."""
    one, two = rounds_of({"name": "fedadam", "lr": 0.1, "tau": 0.1})
    close(one["optimizer/v"], [0.0108, 0.0115])
    close(one["model"], first := [1 + 0.003 / (sqrt(0.0108) + 0.1), 2 - 0.004 / (sqrt(0.0115) + 0.1)])
    close(two["optimizer/m"], [0.017, -0.016])
    close(two["optimizer/v"], [0.010792, 0.011785])
    close(
        two["model"],
        [first[0] + 0.0017 / (sqrt(0.010792) + 0.1), first[1] - 0.0016 / (sqrt(0.011785) + 0.1)],
    )


def test_fedyogi_by_hand() -> None:
    """v = 0.01 + 0.01 (0.09, 0.16), since the squares are larger; then it falls by 0.01 * 0.01 in the first
    coordinate (0.0109 > 0.01) and rises by 0.01 * 0.04 in the second (0.0116 < 0.04)."""
    one, two = rounds_of({"name": "fedyogi", "lr": 0.1, "tau": 0.1})
    close(one["optimizer/v"], [0.0109, 0.0116])
    close(one["model"], first := [1 + 0.003 / (sqrt(0.0109) + 0.1), 2 - 0.004 / (sqrt(0.0116) + 0.1)])
    close(two["optimizer/v"], [0.0108, 0.0120])
    close(two["model"], [first[0] + 0.0017 / (sqrt(0.0108) + 0.1), first[1] - 0.0016 / (sqrt(0.012) + 0.1)])


@pytest.mark.parametrize("name", built_in("server"))
def test_steps_on_a_device_are_those_on_the_host_and_nothing_is_read(name: str) -> None:
    optimiser: ServerOptimizer = build("server", name)
    here: State = {}
    there: State = {}
    with pretended_gpu() as gpu:
        for turn in range(3):
            aggregate = Key(turn).normal(9, dtype=torch.float64)
            found = optimiser.step(aggregate.to(gpu.device), here)
            expected = optimiser.step(aggregate, there)
            here, there = dict(found.state), dict(expected.state)
            assert not gpu.reads and optimiser.works_on_device()
            with gpu.not_counted():
                assert_same(
                    {key: value.cpu() for key, value in {**here, "move": found.move}.items()},
                    {**there, "move": expected.move},
                    1e-15,
                )


def test_a_round_without_updates_is_no_step() -> None:
    rule, before = Averaging(build("method", "fedavg")), rounds_of({"name": "fedadam"})[1]
    steps = rule.round(before, context(server=build("server", "fedadam")))
    after, _ = run_to_end(computed_alone(steps), lambda asked: answer([], [], []))
    assert_same(after, before, 0)


# ---- in whole runs


def test_buffers_are_averaged_and_parameters_take_the_step(simulate: One) -> None:
    one: dict[str, Any] = {"model": NORMALISED, "train": {"rounds": 1, "local_epochs": 1}}
    plain, adam = simulate(**one), simulate(**one, server="fedadam")
    p, start = plain._experiment.network.layout.parameters, plain._experiment.initial
    averaged, stepped = (everything(run)["server/model"] for run in (plain, adam))
    change = (averaged - start)[:p]
    v = 0.99 * 1e-6 + 0.01 * change**2
    torch.testing.assert_close(stepped[:p], start[:p] + 0.01 * 0.1 * change / (v.sqrt() + 1e-3))
    assert torch.equal(stepped[p:], averaged[p:]) and not torch.equal(stepped[p:], start[p:])


def test_a_sweep_over_servers_and_their_settings_is_fused_and_equals_each_run_alone(
    simulate: One, simulate_all: All
) -> None:
    cells: list[Any] = [None, *built_in("server"), {"name": "fedadam", "lr": 0.3, "tau": 0.1}]
    tables = [{"server": server} for server in cells]
    together = simulate_all(tables)
    assert len({str(everything(run)["server/model"].tolist()) for run in together}) == len(cells)
    assert all(len(run.manifest["group"]) == len(cells) for run in together)
    for table, run in zip(tables, together, strict=True):
        assert_same(everything(run), everything(simulate(**table)))


def test_the_state_is_saved_and_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def kill(experiment: Any) -> None:
        if experiment.committed == 2:
            raise Killed

    config = tiny(server="fedyogi", train={"rounds": 4})
    session.start([("", config)], tmp_path / "whole")
    with pytest.raises(Killed):
        session.start([("", config)], tmp_path / "cut", RunCallbacks(moved=kill))
    assert Run(tmp_path / "cut").round < 4
    session.resume(tmp_path / "cut")
    assert_same(everything(Run(tmp_path / "cut")), everything(Run(tmp_path / "whole")), 0)


def test_each_cluster_has_a_state_of_its_own(simulate: One) -> None:
    method = {"name": "clustered-fl", "eps1": 10.0, "eps2": 0.0, "across": 1.0}  # cuts at once
    run = simulate(method=method, server="fedadam", train={"rounds": 2, "local_epochs": 1})
    states = {name for name in everything(run) if name.endswith("optimizer/v")}
    assert len(states) >= 2 and all(name.startswith("server/node") for name in states)


@pytest.mark.parametrize("method", built_in("method"))
def test_every_method_is_moved_by_it_or_refuses_it(method: str, simulate: One) -> None:
    split = {"train": 0.5, "validation": 0.25, "test": 0.25}
    one: dict[str, Any] = {
        "method": {"name": method, **({"customise": False} if method == "fedcap" else {})},
        "data": {"clients": 3, "split": split},
        "train": {"rounds": 1, "local_epochs": 1},
    }
    if not find("method", method).reduces:  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="has no effect; remove 'fedadam'"):
            simulate(**one, server="fedadam")
        return
    plain, moved = everything(simulate(**one)), everything(simulate(**one, server="fedadam"))
    model = "server/models" if method == "clustered-fl" else "server/model"
    assert not torch.equal(plain[model], moved[model])
    assert sum(name.endswith("optimizer/v") for name in moved) == 1


# ---- what is refused


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"method": "local"}, "method 'local' does not aggregate updates, .*; remove 'fedadam'"),
        ({"method": "fedcap"}, "set method.customise = false, or remove 'fedadam'"),
        ({"method": {"name": "pfedme", "beta": 2.0}}, "beta = 2; set it to 1, or remove 'fedadam'"),
        (
            {"train": {"server_lr": 0.5}},
            "train.server_lr: 'fedadam' has a learning rate of its own; set serv",
        ),
        ({"server": {"name": "fedadam", "momentum": 0.9}}, "unknown key 'server.momentum'"),
        ({"server": "adam"}, "unknown server 'adam'"),
    ],
)
def test_combinations_without_a_meaning_are_one_line(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(**{"server": "fedadam", **sections}).parts()


def test_none_is_no_optimiser_also_by_name() -> None:
    assert tiny(server="none").parts().server is None
    assert tiny(method={"name": "fedcap", "customise": False}, server="fedavgm").parts().server is not None
