from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.core.errors import ConfigError
from holdfast.diagnostics.importance import by_place, changes, rank_changes, write_page
from tests.helpers import tiny

FLIP = {"name": "label-flip", "fraction": 0.2}
CLIENTS = {"clients": 5, "partition": {"name": "iid", "samples_per_client": 20}}


def test_rank_changes_by_hand() -> None:
    """By last: order 2, 0, 3, 1. The first client orders 0, 1, 2, 3: entry 2 went from place 0 to 2, 0 from 1
    to 0, 3 from 2 to 3, 1 from 3 to 1. The second has the same order as before."""
    last = torch.tensor([2.0, 9, 1, 3])
    own = torch.tensor([[1.0, 2, 3, 4], [5, 8, 0, 6]])
    assert changes(last, own, 4).tolist() == [[2 / 4, 1 / 4, 1 / 4, 2 / 4], [0, 0, 0, 0]]
    assert changes(last, own, 2).tolist() == [[1.5 / 4, 1.5 / 4], [0, 0]]  # smoothed along the order
    assert changes(last, own, 50).shape == (2, 4)
    assert changes(torch.zeros(3), torch.zeros(1, 3), 3).tolist() == [[0, 0, 0]]  # ties stand by index


def test_both_trainings_start_from_the_same_model(quick_disk: None) -> None:
    config = tiny(method="fedavg", attack=FLIP, data=CLIENTS, train={"rounds": 3, "lr": 0.5})
    frame = rank_changes(config, places=10)
    assert sorted(frame["round"].unique()) == [2, 3] and len(frame) == 2 * 5 * 10
    assert (frame["disparity"] == frame["poisoned"] - frame["benign"]).all() and (frame["benign"] > 0).any()
    assert (
        frame.groupby("client")["disparity"].apply(lambda d: (d != 0).any()).all()
    )  # everybody was poisoned once
    again = rank_changes(config, places=10)
    assert frame.equals(again)


def test_an_attack_that_changes_nothing_makes_no_difference(quick_disk: None) -> None:
    frame = rank_changes(tiny(attack={**FLIP, "ratio": 0.0}, data=CLIENTS, train={"rounds": 2}), places=5)
    assert (frame["disparity"] == 0).all() and (frame["benign"] > 0).any()


def test_without_an_attack_and_drawn(tmp_path: Path, quick_disk: None) -> None:
    frame = rank_changes(tiny(data=CLIENTS, train={"rounds": 9}), rounds=2, places=4)
    assert list(frame.columns) == ["round", "client", "place", "benign"] and set(frame["round"]) == {2}
    means = by_place(frame)
    assert means["place"].tolist() == [0.125, 0.375, 0.625, 0.875]
    assert means["benign"][0] == pytest.approx(frame[frame["place"] == 0.125]["benign"].mean())
    page = write_page(frame, tmp_path / "ranks.html").read_text()
    assert "Rank change" in page and "place in the order by importance" in page and "Disparity" not in page


def test_what_cannot_be_compared(quick_disk: None) -> None:
    with pytest.raises(ConfigError, match="from the second round on"):
        rank_changes(tiny(data=CLIENTS, train={"rounds": 1}))
    with pytest.raises(ConfigError, match="'local' does not send one model to all clients"):
        rank_changes(tiny(method="local", data=CLIENTS))
