from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.aggregators.clusters import number_of_clusters, two_means
from holdfast.core.keys import Key
from holdfast.core.types import State
from holdfast.detectors.base import Judgement
from holdfast.detectors.fldetector import FLDetector
from holdfast.detectors.quasi_newton import changes_of_update
from holdfast.results.run import Run
from holdfast.storage.store import Store
from holdfast.sweeps.session import resume
from tests.detectors.judging import SKEWED, judged, play
from tests.helpers import assert_same, everything, run_all

N, D = 8, 6
HESSIAN = torch.diag(torch.linspace(0.1, 0.9, D, dtype=torch.float64))
OPTIMA = Key(1).normal(N, D, dtype=torch.float64)
LIAR = 5


def test_l_bfgs_by_hand() -> None:
    """On a line an update that shrinks by half with each step of 1, 0.5, 0.25 changes by -0.5 per unit."""
    steps = torch.tensor([[1.0], [0.5], [0.25]], dtype=torch.float64)
    found = changes_of_update(steps) @ steps
    assert found[:, 0].tolist() == pytest.approx([-0.875, -0.375, -0.125])
    assert changes_of_update(torch.zeros(3, 2)).tolist() == [[0.0] * 3] * 3


def test_l_bfgs_against_the_slow_reference() -> None:
    """The dense matrix, updated pair by pair (BFGS)."""
    steps = Key(2).normal(4, D, dtype=torch.float64)
    pairs = [(steps[i], steps[i + 1] - steps[i]) for i in range(3)]
    s, y = pairs[-1]
    dense = (y @ s) / (s @ s) * torch.eye(D, dtype=torch.float64)
    for s, y in pairs:
        moved = dense @ s
        dense = dense - torch.outer(moved, moved) / (s @ moved) + torch.outer(y, y) / (y @ s)
    found = changes_of_update(steps) @ steps
    for j in range(4):
        torch.testing.assert_close(found[j], dense @ steps[j:].sum(dim=0))


def test_the_gap_statistic_and_the_worse_cluster() -> None:
    ids = torch.arange(10)
    two = torch.tensor([1.0, 1.1, 0.9, 1.05, 5, 5.1, 4.9, 1.02, 0.97, 1.0])
    assert number_of_clusters(two, ids, 7, 10) > 1
    assert two_means(two, ids, Key(0)).nonzero().flatten().tolist() == [4, 5, 6]
    order = torch.tensor([3, 9, 1, 4, 0, 2, 8, 7, 6, 5])
    assert torch.equal(two_means(two[order], ids[order], Key(0)), two_means(two, ids, Key(0))[order])
    assert number_of_clusters(torch.linspace(0, 1, 10), ids, 7, 10) == 1
    assert number_of_clusters(torch.ones(10), ids, 7, 10) == 1


def played(detector: FLDetector, rounds: int) -> list[Judgement]:
    """Clients that take gradient steps on quadratic functions with one Hessian, and one that sends noise."""
    model, state, out = torch.zeros(D, dtype=torch.float64), detector.init(), []
    for turn in range(rounds):
        updates = (OPTIMA - model) @ HESSIAN * 0.3
        updates = updates + Key(turn).fold("noise").normal(N, D, dtype=torch.float64) * 1e-3
        updates[LIAR] = Key(turn).normal(D, dtype=torch.float64) * 0.3
        out.append(judged(detector, updates, model, state))
        state = out[-1].state
        model = model + updates.mean(dim=0)
    return out


def test_who_does_not_follow_the_prediction_is_banned_after_the_window() -> None:
    said = played(FLDetector(window=4), 8)
    assert [len(one.banned) for one in said[:5]] == [0] * 5
    caught = [set(one.banned) for one in said[5:]]
    assert {LIAR} in caught and all(one <= {LIAR} for one in caught)
    scores = said[-1].scores["inconsistency"]
    assert int(scores.argmax()) == LIAR and float(scores[LIAR]) > 3 * float(scores.median())


def test_after_the_first_ban_it_looks_no_further() -> None:
    rest = [client for client in range(N) if client != LIAR]
    model, state = torch.zeros(D, dtype=torch.float64), played(FLDetector(window=2), 4)[-1].state
    assert state["counts"].tolist() == [4, 2, 1] and state["streak"][LIAR] == 1
    x = torch.zeros(7, D, dtype=torch.float64)
    x[3] = 9.0  # another one stands out
    assert judged(FLDetector(window=2), x, model, state, rest).banned == {}
    assert set(judged(FLDetector(window=2, again=True), x, model, state, rest).banned) == {3}


def test_the_distances_against_the_slow_reference() -> None:
    """Three rounds: one pair, and a client that was absent in the second."""
    w = Key(6).normal(3, D, dtype=torch.float64)
    g = Key(7).normal(3, 4, D, dtype=torch.float64)
    detector, state, ids = FLDetector(window=2), {}, [0, 1, 2, 3]
    for turn, here in enumerate(([0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3])):
        said = judged(detector, g[turn][here], w[turn], state, here)
        state = said.state
    s, y = w[1] - w[0], (w[2] - w[1]) - (w[1] - w[0])
    sigma = (y @ s) / (s @ s) * torch.eye(D, dtype=torch.float64)
    moved = sigma @ s
    dense = sigma - torch.outer(moved, moved) / (s @ moved) + torch.outer(y, y) / (y @ s)
    expected = []
    for i in ids:
        last = 0 if i == 2 else 1
        expected.append(float((g[last, i] + dense @ (w[2] - w[last]) - g[2, i]).norm()))
    assert said.scores["inconsistency"].tolist() == pytest.approx([v / sum(expected) for v in expected])


def test_the_memory_is_bounded() -> None:
    detector, state = FLDetector(window=2), {}
    for turn in range(7):  # a new client in every round
        ids = [turn, turn + 50]
        state = judged(detector, [[1.0, turn], [2.0, 1]], [float(turn), 0], state, ids).state
    assert state["models"].shape == (4, 2) and len(state["clients"]) == len(state["updates"]) == 6
    assert state["distances"].shape == (6, 2) and state["clients"].tolist() == [4, 5, 6, 54, 55, 56]
    fewer: State = judged(detector, [[1.0]], [0.0], state, [3]).state  # another part travels
    assert fewer["models"].shape == (1, 1)


def test_the_memory_survives_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[str, Any] = {
        "detectors": [{"name": "fldetector", "window": 2}],
        "attack": {"name": "gaussian", "fraction": 0.2},
        "data": {"clients": 8},
        "train": {"rounds": 6, "participation": 0.8},
    }
    whole = everything(run_all([table], tmp_path / "whole")[0])
    commit, calls = Store.write_head, itertools.count()

    def stop(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 4:  # rounds 0 to 3 are committed
            raise KeyboardInterrupt
        return commit(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Store, "write_head", stop)
        run_all([table], tmp_path / "cut")
    resume(tmp_path / "cut")
    assert_same(everything(Run(tmp_path / "cut")), whole, 0.0)


@pytest.mark.slow
def test_scaled_models_are_found_and_colluders_are_not(simulate: Callable[..., Run]) -> None:
    """The paper: attackers are banned after a few rounds, and no honest client is. It holds for scaled models
    (replacement) and noise; attackers that all send the same vector, near the mean (LIE), are more consistent
    than the honest clients, which are banned in their place."""
    whole = {"rounds": 15, "local_epochs": 1, "lr": 0.1, "batch_size": 60, "dtype": "float64"}
    for attack in ("replacement", "gaussian", "lie"):
        table = play(
            SKEWED,
            detectors=[{"name": "fldetector", "window": 5}],
            attack={"name": attack, "fraction": 0.2},
        )
        final = simulate(**{**table, "train": whole}).final
        if attack == "lie":
            assert final["detection/auc/fldetector/inconsistency"] < 0.1 and final["detection/fnr"] == 1
        else:
            assert final["detection/dacc"] == 1 and final["detection/rounds"] == 7
