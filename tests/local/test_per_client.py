"""Numbers with one value per client: what keeps them apart works, what would take one for all is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.core.errors import SettingError
from holdfast.local.per_client import PerClient, Settings, plain

LAM = torch.tensor([0.0, 50.0, 50.0])


@pytest.mark.parametrize(
    "read",
    [
        lambda lam: lam[0], lambda lam: lam[0].item(), lambda lam: lam[:1], lambda lam: lam[-1], lambda lam: float(lam),
        lambda lam: lam.item(), lambda lam: lam.mean(), lambda lam: torch.mean(lam), lambda lam: lam.sum(), lambda lam: (2 * lam)[0],
        lambda lam: (1 - lam).mean(),
        lambda lam: bool(lam), lambda lam: lam[torch.tensor(0)], lambda lam: lam.select(0, 0), lambda lam: lam.clone().double()[0],
        lambda lam: lam[lam > 1][0],
    ],
)  # fmt: skip
def test_one_value_for_all_clients_is_refused(read: Callable[[Any], Any]) -> None:
    with pytest.raises(SettingError, match=r"^test_per_client.py, line \d+: local.settings.lam has one value per client"):
        read(PerClient.of(LAM, "settings.lam"))
    with pytest.raises(SettingError):
        read(PerClient.of(LAM[:1], "settings.lam"))  # of a single client too: what works there would be wrong in a sweep


def test_what_keeps_one_value_per_client_works() -> None:
    lam, models = PerClient.of(LAM, "settings.lam"), torch.ones(3, 2)
    assert (lam[:, None] * models).tolist() == [[0, 0], [50, 50], [50, 50]]
    assert torch.cat([torch.zeros_like(lam), lam]).tolist() == [0, 0, 0, 0, 50, 50]
    assert lam[lam > 1].tolist() == [50, 50] and lam[torch.tensor([2, 0])].tolist() == [50, 0]
    assert lam.tolist() == [0, 50, 50] and [float(one) for one in lam] == [0, 50, 50] and lam.numpy().tolist() == [0, 50, 50]
    assert float(lam.max()) == 50 and bool((lam > 0).any()) and lam.view(-1, 1).shape == (3, 1)


def test_what_is_computed_with_a_clients_own_tensors_is_an_ordinary_tensor() -> None:
    lam = PerClient.of(LAM, "settings.lam")
    assert type(lam * torch.ones(3)) is Tensor and type(lam[:, None]) is Tensor and type(plain(lam)) is Tensor
    assert type(1 - lam) is PerClient and type(lam.to(torch.float64)) is PerClient


def test_a_setting_that_is_no_real_number_is_said_to_be_elsewhere() -> None:
    with pytest.raises(AttributeError, match=r"no 'mode'; it has the real-valued settings of the method \(lam\), .* in self.method"):
        _ = Settings(lam=LAM).mode
