"""Several processes that run one experiment together give the bits of one, for every method; here they are
threads (tests/thread_ranks.py), in tests/cli/test_rank_processes.py processes."""

from __future__ import annotations

import json
import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.aggregators.reduction import Reduction
from holdfast.core.columns import OneRank
from holdfast.core.errors import ConfigError, RunError
from holdfast.core.share import Share
from holdfast.engine.simulator import Simulator
from holdfast.experiment.loop import Experiment
from holdfast.experiment.runner import RunCallbacks
from holdfast.experiment.session import resume_run, start_run
from holdfast.local.client import Local
from holdfast.results.run import Run
from holdfast.storage.client_state import RowStore
from holdfast.sweeps.session import resume
from tests.attacks import searched_trigger  # noqa: F401  # registers its attacks
from tests.helpers import assert_same, built_in, everything, methods_in_turn, run_all, tiny
from tests.thread_ranks import ThreadRanks, on_ranks

ATTACKED: dict[str, Any] = {
    "data": {"clients": 7, "root": 12},
    "engine": {"plan": "loop", "threads": 1},
    "train": {"rounds": 2, "participation": 0.8},
    "attack": {"name": "lie", "knows": "everyone", "fraction": 0.3},
}


@pytest.fixture(autouse=True)
def _one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what threads share and processes do not: PyTorch's generator, by which first weights are drawn, and
    the number of the process, which is in the names of temporary files."""
    one = threading.Lock()
    settled = RowStore._settled

    def alone(self: RowStore, fields: Any) -> Any:
        with one:
            return settled(self, fields)

    monkeypatch.setattr(RowStore, "_settled", alone)

    class Built(Experiment):
        def __init__(self, *args: Any, **kwargs: Any):
            with one:
                super().__init__(*args, **kwargs)

    monkeypatch.setattr("holdfast.experiment.session.Experiment", Built)


def on(count: int, table: dict[str, Any], out: Path) -> Run:
    """The run of an experiment by so many ranks."""
    config = tiny(**table)

    def play(ranks: ThreadRanks) -> None:
        start_run("", config, out, RunCallbacks(), [], Simulator, ranks)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "method .* reads whole updates")
        on_ranks(count, play)
    return Run(out, config)


def settings_of(method: str) -> dict[str, Any]:
    table = {**ATTACKED, "method": method}
    return (
        {**table, "aggregator": {"name": "multi-krum", "f": 1}}
        if built_in("method")[method].reduces
        else table
    )


@pytest.mark.parametrize("method", methods_in_turn())
def test_the_bits_do_not_depend_on_the_number_of_ranks(method: str, tmp_path: Path) -> None:
    table = settings_of(method)
    alone, two, three = (on(count, table, tmp_path / str(count)) for count in (1, 2, 3))
    for many in (two, three):
        assert_same(everything(alone), everything(many), tolerance=0.0)
        state = json.loads((alone.path / "head.json").read_text())["state"]
        for name in ("head.json", state):
            assert (many.path / name).read_bytes() == (alone.path / name).read_bytes()
    (ordinary,) = run_all([table], tmp_path / "ordinary")
    assert_same(everything(ordinary), everything(three))


@pytest.mark.parametrize("plan", ["vmap", "captured-loop"])
def test_other_plans_agree_to_rounding(plan: str, tmp_path: Path) -> None:
    table = {**settings_of("ditto"), "engine": {"plan": plan, "threads": 1}}
    (ordinary,) = run_all([table], tmp_path / "ordinary")
    assert_same(everything(ordinary), everything(on(3, table, tmp_path / "three")))


@pytest.mark.parametrize("attack", ["searched-trigger", "away"])
def test_attackers_that_train_by_themselves_on_ranks(attack: str, tmp_path: Path) -> None:
    """With a server half that reads columns, and one that reads whole updates."""
    for method in ("ditto", "fedcap"):
        table = {**settings_of(method), "attack": {"name": attack, "fraction": 0.4}}
        alone, three = on(1, table, tmp_path / f"{method}1"), on(3, table, tmp_path / f"{method}3")
        assert any(name.startswith("attack/") for name in everything(alone))
        assert_same(everything(alone), everything(three), tolerance=0.0)
        (ordinary,) = run_all([table], tmp_path / f"{method}ordinary")
        assert_same(everything(ordinary), everything(three))


@pytest.mark.parametrize("rule", ["mean", "fltrust", "foolsgold", "lfr"])
def test_privacy_detectors_server_optimisers_and_lost_replies_on_ranks(rule: str, tmp_path: Path) -> None:
    """Also ranks without a client in a round: three ranks ask two clients."""
    table = {
        **ATTACKED,
        "method": "fedavg",
        "aggregator": {"name": "mean", "f": 1, "wrap": ["lfr", "weak-dp"]} if rule == "lfr" else rule,
        "server": "fedadam",
        "detectors": ["norm", "committee"] if rule == "foolsgold" else [],
        "train": {"rounds": 3, "participation": 0.3, "dropout": 0.3},
        "privacy": {"level": "sample", "clip": 1.0, "noise": 0.5} if rule == "mean" else "none",
    }
    alone, three = on(1, table, tmp_path / "1"), on(3, table, tmp_path / "3")
    assert_same(everything(alone), everything(three), tolerance=0.0)
    (ordinary,) = run_all([table], tmp_path / "ordinary")
    assert_same(everything(ordinary), everything(three))


@pytest.mark.parametrize("rule", ["flame", "deepsight"])
@pytest.mark.filterwarnings("ignore:.*reads whole updates:RuntimeWarning")
def test_choices_answers_to_made_up_inputs_and_noise_on_ranks(rule: str, tmp_path: Path) -> None:
    deepsight = {"name": "deepsight", "samples": 20}
    batch_norm = {"name": "mlp", "hidden": 6, "batch_norm": True}
    names = ["flame", "multi-krum", "signguard", "alignins", {"name": "fldetector", "window": 1}, deepsight]
    table = {
        **ATTACKED,
        "data": {"clients": 9},
        "model": batch_norm if rule == "deepsight" else {"name": "mlp", "hidden": 6},
        "aggregator": deepsight if rule == "deepsight" else rule,
        "detectors": [] if rule == "deepsight" else names,
        "train": {"rounds": 3},
    }
    alone, three = on(1, table, tmp_path / "1"), on(3, table, tmp_path / "3")
    assert_same(everything(alone), everything(three), tolerance=0.0)
    (ordinary,) = run_all([table], tmp_path / "ordinary")
    assert_same(everything(ordinary), everything(three))


def test_every_rank_trains_some_clients_and_only_the_first_writes_the_round(tmp_path: Path) -> None:
    seen: dict[int, set[int]] = {}
    config = tiny(**settings_of("ditto"))

    def play(ranks: ThreadRanks) -> None:
        result = start_run("", config, tmp_path / "run", RunCallbacks(), [], Simulator, ranks)
        assert ("final" in result) == (ranks.rank == 0)

    on_ranks(2, play)
    work = torch.tensor([9, 1, 1, 1, 9, 2, 2])
    for rank in range(2):
        share = Share.by_work(ThreadRanks(rank, 2, None, []), work)  # type: ignore[arg-type]
        ids = torch.arange(7)
        seen[rank] = set(ids[share.mine(ids)].tolist())
    assert seen[0] | seen[1] == set(range(7)) and not seen[0] & seen[1]
    assert abs(sum(work[list(seen[0])]) - sum(work[list(seen[1])])) <= 1


def test_an_error_of_one_rank_ends_all_and_any_number_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {**settings_of("fedcap"), "train": {"rounds": 4, "participation": 0.8}}
    whole, out = on(2, table, tmp_path / "whole"), tmp_path / "broken"
    fit = Local.fit
    messages = []

    def failing(self: Local, *args: Any, **kwargs: Any) -> Any:
        if self.round == 3 and 0 in self.ids.tolist():  # the rank that has client 0
            raise RunError("the disk of this machine is gone")
        return fit(self, *args, **kwargs)

    def play(ranks: ThreadRanks) -> None:
        try:
            start_run("", tiny(**table), out, RunCallbacks(), [], Simulator, ranks)
        except RunError as error:
            messages.append(str(error))

    with monkeypatch.context() as patch:
        patch.setattr(Local, "fit", failing)
        on_ranks(3, play)
    assert len(messages) == 3
    assert sum(message.startswith("rank ") for message in messages) == 2
    assert all("the disk of this machine is gone" in message for message in messages)
    assert (out / "head.json").read_text() != (whole.path / "head.json").read_text()
    on_ranks(2, lambda ranks: resume_run(out, RunCallbacks(), None, Simulator, None, ranks=ranks))
    assert_same(everything(whole), everything(Run(out, tiny(**table))), tolerance=0.0)


def test_a_process_alone_goes_on_with_a_run_of_several(tmp_path: Path) -> None:
    """As several do: with columns, so that the bits are theirs."""
    long = {**settings_of("fedavg"), "train": {"rounds": 4, "participation": 0.8}}
    short = {**long, "train": {"rounds": 2, "participation": 0.8}}
    whole = on(3, long, tmp_path / "whole")
    run = on(3, short, tmp_path / "short")
    resume(run.path, rounds=4)
    assert_same(everything(whole), everything(Run(run.path, tiny(**long))), tolerance=0.0)
    assert run.manifest["ranks"] == 3


def test_ranks_that_compute_differently_commit_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.engine import distributed

    sums = distributed._sums
    rounds = threading.local()

    def differing(tensors: Any) -> dict[str, Any]:
        """As if the second rank computed another model in round 1."""
        rounds.seen = getattr(rounds, "seen", 0) + 1
        other = rounds.seen == 2 and threading.current_thread().name.endswith("1")
        return {**sums(tensors), "server/model": 1} if other else sums(tensors)

    monkeypatch.setattr(distributed, "_sums", differing)
    with pytest.raises(
        RunError, match=r"ranks 0 and 1 computed different numbers in round 1 \('server/model'\)"
    ):
        on(2, settings_of("fedavg"), tmp_path / "run")
    assert '"round": 0' in (tmp_path / "run" / "head.json").read_text()


def test_ranks_with_other_settings_or_data_are_refused(tmp_path: Path) -> None:
    def play(changes: dict[str, Any], ranks: ThreadRanks) -> None:
        table = {**settings_of("fedavg"), **(changes if ranks.rank else {})}
        start_run("", tiny(**table), tmp_path / "run", RunCallbacks(), [], Simulator, ranks)

    for changes, differs in (
        ({"train": {"rounds": 2, "participation": 0.8, "lr": 0.2}}, "train.lr"),
        ({"attack": "label-flip"}, "attack"),
        ({"seed": 1}, "seed"),
    ):
        said = rf"ranks 0 and 1 would run different experiments: they differ in {differs}"
        with pytest.raises(ConfigError, match=said):
            on_ranks(2, partial(play, changes))
    assert not (tmp_path / "run").exists()


def test_memory_that_runs_out_on_one_rank_is_not_tried_again_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = threading.local()
    reduced = Reduction.alone

    def short(self: Reduction) -> Any:
        calls.made = getattr(calls, "made", 0) + 1
        if threading.current_thread().name.endswith("1") and calls.made == 1:
            raise torch.OutOfMemoryError("no room")
        return reduced(self)

    monkeypatch.setattr(Reduction, "alone", short)
    monkeypatch.setattr("tests.thread_ranks.PATIENCE", 3.0)
    with pytest.raises((torch.OutOfMemoryError, RunError), match="no room"):
        on(2, settings_of("fedavg"), tmp_path / "run")


def test_workers_are_refused_beside_ranks(tmp_path: Path) -> None:
    table = {**settings_of("fedavg"), "engine": {"plan": "loop", "workers": 2}}
    with pytest.raises(ConfigError, match=r"engine\.workers: several processes run this experiment already"):
        on(2, table, tmp_path / "run")


def test_one_rank_has_all_clients() -> None:
    share = Share.by_work(OneRank(), torch.ones(5))
    assert share.mine(torch.tensor([-1, 0, 4])).all()
