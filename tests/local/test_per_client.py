"""Numbers in which the experiments of a stack differ: what keeps a row for each client works, what would take
one for all is noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.local.per_client import (
    PerClient,
    Settings,
    TrainedApart,
    handed,
    plain,
    rows_of_number,
    training,
)

LAM = torch.tensor([0.0, 50.0, 50.0])
ONE_FOR_ALL: list[Callable[[Any], Any]] = [
    lambda lam: lam[0],
    lambda lam: lam[:1],
    lambda lam: lam[-1],
    lambda lam: lam[[0]],
    lambda lam: lam[..., 0],
    lambda lam: lam[None],
    lambda lam: lam[np.int64(0)],
    lambda lam: lam[torch.tensor(0)],
    lambda lam: lam[:, None][0],
    lambda lam: lam.view(-1, 1)[0, 0],
    lambda lam: lam.tolist(),
    lambda lam: lam.numpy(),
    lambda lam: np.asarray(lam),
    lambda lam: next(iter(lam)),
    lambda lam: lam.unbind(),
    lambda lam: lam.cpu().double()[0],
    lambda lam: bool(lam.any()),
    lambda lam: lam.mean(),
    lambda lam: torch.mean(input=lam),
    lambda lam: lam.sum(),
    lambda lam: lam.max(),
    lambda lam: lam @ lam,
    lambda lam: (2 * lam)[0],
    lambda lam: (lam * torch.tensor([2.0]))[0],
    lambda lam: (lam * torch.ones(3))[0],
    lambda lam: lam.repeat(2)[0],
    lambda lam: lam.sort().values[0],
    lambda lam: lam.select(0, 0),
    lambda lam: lam.narrow(0, 0, 1),
    lambda lam: lam.split(1),
    lambda lam: lam.data[0],
]


def differing() -> Any:
    return handed("settings", {"lam": LAM})["lam"]


@pytest.mark.parametrize("read", ONE_FOR_ALL)
def test_reading_one_value_for_all_clients_is_an_error(read: Callable[[Any], Any]) -> None:
    with pytest.raises(
        TrainedApart,
        match=r"^test_per_client.py, line \d+: local.settings.lam is read as one value for all clients",
    ):
        read(differing())


def test_where_all_clients_agree_it_is_an_ordinary_tensor() -> None:
    alike = handed("settings", {"lam": torch.full((3,), 7.0), "none": None})
    assert type(alike["lam"]) is Tensor and alike["none"] is None and type(differing()) is PerClient


def test_what_keeps_a_row_for_each_client_works() -> None:
    lam, models = differing(), torch.ones(3, 2)
    assert plain(lam[:, None] * models).tolist() == [[0, 0], [50, 50], [50, 50]]
    assert plain(torch.cat([torch.zeros_like(lam), lam])).tolist() == [0, 0, 0, 0, 50, 50]
    assert plain(lam[torch.tensor([2, 0, 1])]).tolist() == [50, 0, 50]
    assert plain(torch.stack([lam, lam], 1).sum(1)).tolist() == [0, 100, 100]
    assert plain(torch.where(lam > 1, lam, 1.0)).tolist() == [1, 50, 50] and plain(
        lam.sort().values
    ).tolist() == [0, 50, 50]
    assert (len(lam), lam.shape, lam.dtype, lam.ndim, lam.device.type) == (
        3,
        (3,),
        torch.float32,
        1,
        "cpu",
    ) and "50" in repr(lam)
    assert (
        type(copy.deepcopy(lam)) is PerClient
        and type(lam * models.T[0]) is PerClient
        and type(lam[:, None] * models) is Tensor
    )


def test_fewer_clients_keep_their_own() -> None:
    assert type(rows_of_number(differing(), torch.tensor([True, True, False]))) is PerClient
    assert rows_of_number(differing(), torch.tensor([False, True, False])).tolist() == [50]


def test_a_loss_that_closes_over_per_client_numbers_is_an_error() -> None:
    """In a training step a batch of three samples would meet three clients, and nothing would be wrong with
    the shapes."""
    lam = differing()
    with training(), pytest.raises(TrainedApart, match="hand it to a loss by aux"):
        torch.ones(3) + lam
    assert type(torch.ones(3) + lam) is PerClient


def test_the_error_for_a_setting_that_is_not_a_real_number_says_where_it_is() -> None:
    with pytest.raises(
        AttributeError,
        match=r"no 'mode'; it has the real-valued settings of the method \(lam\), .* in self.method",
    ):
        _ = Settings(lam=LAM).mode
