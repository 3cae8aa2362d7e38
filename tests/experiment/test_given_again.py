"""How objects that a folder cannot hold are given again."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.experiment.given_again import arguments


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"model": "<Net>", "train": {"loss": "<my_loss>", "lr": 0.1}},
            ["model=Net", 'train={"loss": my_loss}'],
        ),
        ({"model": "<Model(Net,head=fc)>"}, ['model=holdfast.Model(Net, head="fc")']),
        ({"model": "<Model(Net(width=7),head=None)>"}, ["model=holdfast.Model(...)"]),
        ({"model": "<Model(lambda)>"}, ["model=holdfast.Model(...)"]),
        ({"method": "<make.<locals>.Mine(lam=0.5)>"}, ["method=Mine(...)"]),
        ({"detectors": ["norm", "<Mine>"]}, ["detectors=..."]),
        ({"model": "mlp", "data": {"names": ["York"]}}, []),
    ],
)
def test_arguments(config: dict[str, Any], said: list[str]) -> None:
    assert arguments(config) == said
