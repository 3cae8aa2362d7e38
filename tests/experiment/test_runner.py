"""Experiments played together: one that fails leaves the others alone, and what they share is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import ConfigError, RunError
from holdfast.core.registry import register, setting
from holdfast.experiment import manifest
from holdfast.methods import ClientRule, Method
from holdfast.methods.averaging import Averaging
from holdfast.results.run import Run
from holdfast.storage.store import Store
from holdfast.sweeps import session
from tests.helpers import assert_same, everything, tiny


class Falling(Averaging):
    """Fails in its second round."""

    def round(self, state: Any, ctx: Any) -> Any:
        if ctx.round == 2:
            raise ZeroDivisionError("the server fell")
        return (yield from super().round(state, ctx))


class Stumbling(ClientRule):
    """Fails on the clients' side, in the second round."""

    def train(self, local: Any, state: Any, received: Any, extra: Any) -> Any:
        if local.round == 2:
            raise ZeroDivisionError("the client fell")
        fitted = local.fit(received.model)
        mixed = (
            local.settings.half[:, None] * fitted.model + (1 - local.settings.half[:, None]) * received.model
        )
        return state, local.report(mixed, received, fitted)


class Steady(Stumbling):
    def train(self, local: Any, state: Any, received: Any, extra: Any) -> Any:
        return super().train(
            local if local.round != 2 else type(local)(**{**vars(local), "round": 3}), state, received, extra
        )


@register("method", "test-falling")
class FallingMethod(Method):
    """Fails on the server."""

    Client, Server = Steady, Falling
    half: float = setting(0.5, "share of the trained model")


@register("method", "test-stumbling")
class StumblingMethod(Method):
    """Fails on the clients."""

    Client, Server = Stumbling, Averaging
    half: float = setting(0.5, "share of the trained model")


@pytest.mark.parametrize("name", ["test-falling", "test-stumbling"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_experiment_that_fails_does_not_stop_the_others(tmp_path: Path, name: str, dtype: str) -> None:
    """Also: a method's settings are tensors of the network's own dtype, so they can be multiplied with
    models."""
    train = {"rounds": 3, "local_epochs": 1, "batch_size": 5, "lr": 0.1, "dtype": dtype}
    cells = [
        (label, tiny(method=method, train=train))
        for label, method in (("good", "fedavg"), ("bad", name), ("fine", "ditto"))
    ]
    with pytest.raises(
        RunError,
        match="1 of 3 experiments failed, the others are finished: 'bad' in round 2: ZeroDivisionError",
    ):
        session.start(cells, tmp_path / "sweep")
    good, bad, fine = (
        Run(folder, config)
        for folder, (_, config) in zip(manifest.run_folders(tmp_path / "sweep"), cells, strict=True)
    )
    assert good.round == 3 and fine.round == 3 and bad.round == 1
    alone = session.start([("", cells[0][1])], tmp_path / "alone")[0]
    assert alone["final"]["accuracy"] == good.final["accuracy"]
    with pytest.raises(RunError, match="1 of 3 experiments failed"):  # what is finished is not played again
        session.resume(tmp_path / "sweep")


def test_what_was_done_before_another_failed_is_not_done_twice(tmp_path: Path) -> None:
    """The first cell has trained and staged its private rows when the second fails; both are then played
    again, one by one."""
    cells = [
        ("ditto", tiny(method="ditto", train={"rounds": 3})),
        ("bad", tiny(method="test-stumbling", train={"rounds": 3})),
    ]
    with pytest.raises(RunError, match="'bad' in round 2"):
        session.start(cells, tmp_path / "sweep")
    session.start(cells[:1], tmp_path / "alone")
    together, alone = Run(tmp_path / "sweep" / "000-ditto"), Run(tmp_path / "alone")
    assert_same(everything(together), everything(alone))


def test_a_single_run_fails_with_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="the server fell"):
        session.start([("", tiny(method="test-falling"))], tmp_path / "run")


def test_the_engine_is_not_swept_over(tmp_path: Path) -> None:
    cells = [("a", tiny(engine={"plan": "loop"})), ("b", tiny(engine={"plan": "vmap"}))]
    with pytest.raises(ConfigError, match="do not sweep over engine"):
        session.start(cells, tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


def test_every_batch_size_has_its_own_plan(tmp_path: Path) -> None:
    sizes = {"small": 2, "large": 200}
    cells = [(n, tiny(train={"batch_size": b}, engine={"memory": "200kB"})) for n, b in sizes.items()]
    session.start(cells, tmp_path / "sweep")
    rows = [
        json.loads((f / "manifest.json").read_text())["plan"]["stack"]
        for f in manifest.run_folders(tmp_path / "sweep")
    ]
    assert rows[0] > rows[1] >= 1


def test_folders_of_a_thousand_cells_sort_as_cells_do() -> None:
    names = [manifest.folder_name(place, 1001, "x") for place in (0, 9, 101, 1000)]
    assert names == sorted(names) and len({len(name) for name in names}) == 1


def test_no_round_is_committed_before_all_are_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No head moves before every experiment of the round is on disk."""
    order: list[tuple[str, int]] = []
    for step in ("prepare", "commit"):
        original = getattr(Store, step)

        def watched(self: Store, round: int, *args: Any, _step: str = step, _original: Any = original) -> Any:
            order.append((_step, round))
            return _original(self, round, *args)

        monkeypatch.setattr(Store, step, watched)
    session.start([("a", tiny(method="ditto")), ("b", tiny(method="fedavg", seed=1))], tmp_path / "sweep")
    rounds = [entry for entry in order if entry[1] > 0]
    assert rounds == [(s, r) for r in (1, 2) for s in ("prepare", "prepare", "commit", "commit")]
