"""The claim that labels of an axis differ little."""

from __future__ import annotations

import pytest

from holdfast.reproduction.claims import examine
from holdfast.reproduction.study import Claim, find
from holdfast.reproduction.values import printed

ALL = ("1", "5", "20")


@pytest.mark.parametrize(
    ("by", "labels", "right"), [(1.2, ALL, 0), (1.4, ALL, 1), (6, ALL, 3), (1, ("5", "20"), 2)]
)
def test_steady(by: float, labels: tuple[str, ...], right: int) -> None:
    """FedCOM's Table 2 over x = 1, 5, 20: on MNIST 94.5, 98.5, 100; on FMNIST 96.7, 100, 100; on CIFAR-10 97,
    98.3, 97.7."""
    study = find("fedcom", "table-2")[0]
    claim = Claim(
        says="robust to x", check="steady", axis="x", by=by, where={"x": labels, "signal": "update"}
    )
    found = examine(claim, printed(study, study.axes))
    assert found.cases == 3 and found.right == right
