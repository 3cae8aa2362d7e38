"""benchmarks/committee.py: its cells are valid configs, in the order in which the tables are
filled."""

from __future__ import annotations

from benchmarks import committee
from holdfast.methods.c_pfl import CPfl
from holdfast.sweeps.grid import configs


def test_cells_are_in_the_order_of_the_tables() -> None:
    cells = [config for _, config in configs(committee.config(rounds=1, seeds=2))]
    assert len(cells) == len(committee.ATTACKS) * len(committee.COMMITTEES) * 2
    assert [cell.seed for cell in cells[:4]] == [0, 1, 0, 1]
    methods = [cell.parts().method for cell in cells[:8:2]]
    assert all(isinstance(method, CPfl) for method in methods)
    assert [method.committee and method.committee.scores for method in methods] == [
        False,
        "all",
        "admitted",
        "members",
    ]
    assert [cell.attack is None for cell in cells[:: 2 * len(committee.COMMITTEES)]] == [
        True,
        False,
        False,
        False,
        False,
    ]
