"""Units: which cells train together, and how they are cut for more devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.experiment.build import shared_samples
from holdfast.experiment.config import make_config
from holdfast.experiment.loop import Experiment
from holdfast.local.plan import Plan
from holdfast.sweeps.folder import Group
from holdfast.sweeps.grid import expand
from holdfast.sweeps.units import Unit, cost_of, cut, units_of
from tests.helpers import TINY


def experiments_of(out: Path, **grid: Any) -> list[Experiment]:
    configs = [make_config(table) for _, table in expand({**TINY, "sweep": grid})]
    stores = shared_samples(configs)
    return [
        Experiment(config, out / f"{place:03d}", samples=samples)
        for place, (config, samples) in enumerate(zip(configs, stores, strict=True))
    ]


def group_of(*cells: str) -> Group:
    return Group(cells, (Plan("vmap"),) * len(cells), 1, "cpu", "2.13.0")


def cells_of(units: list[Unit]) -> list[tuple[str, ...]]:
    return sorted(unit.cells for unit in units)


def test_cells_that_train_as_one_stack_are_one_unit(tmp_path: Path) -> None:
    experiments = experiments_of(tmp_path, **{"method.name": ["fedavg", "ditto"], "seed": [0, 1]})
    assert cells_of(units_of(experiments, [], 1)) == [("000", "001"), ("002", "003")]
    assert cells_of(units_of(experiments, [], 2)) == [("000", "001"), ("002", "003")]


def test_the_costliest_unit_is_cut_for_a_third_device(tmp_path: Path) -> None:
    """Ditto trains two models per client, so its cells cost twice as much as those of FedAvg."""
    experiments = experiments_of(tmp_path, **{"method.name": ["fedavg", "ditto"], "seed": [0, 1]})
    costs = [cost_of(experiment) for experiment in experiments]
    assert costs[2] == pytest.approx(2 * costs[0], rel=0.3)
    assert cells_of(units_of(experiments, [], 3)) == [("000", "001"), ("002",), ("003",)]
    assert len(units_of(experiments, [], 99)) == 4, "a cell is never cut"


def test_a_group_that_has_begun_is_never_cut(tmp_path: Path) -> None:
    experiments = experiments_of(tmp_path, **{"method.name": ["fedavg", "ditto"], "seed": [0, 1]})
    units = units_of(experiments, [group_of("001", "002", "003")], 8)
    assert cells_of(units) == [("000",), ("001", "002", "003")]
    assert [unit.begun is not None for unit in units] == [True, False], "the costliest is first"


def test_finished_cells_are_not_part_of_a_unit(tmp_path: Path) -> None:
    experiments = experiments_of(tmp_path, seed=[0, 1, 2])
    assert cells_of(units_of(experiments[1:], [group_of("000", "001", "002")], 1)) == [("001", "002")]


def test_cuts_have_nearly_equal_cost_and_lose_no_cell() -> None:
    unit = Unit(tuple("abcdef"), (5.0, 1.0, 1.0, 1.0, 1.0, 1.0))
    for slots in range(1, 9):
        pieces = cut([unit], slots)
        assert sorted(cell for piece in pieces for cell in piece.cells) == list("abcdef")
        assert len(pieces) == min(slots, 6)
    assert cells_of(cut([unit], 2)) == [("a",), ("b", "c", "d", "e", "f")]


def test_cells_without_a_predicted_cost_are_cut_too() -> None:
    pieces = cut([Unit(("a", "b", "c"), (0.0, 0.0, 0.0))], 3)
    assert cells_of(pieces) == [("a",), ("b",), ("c",)]


def test_the_same_sweep_is_cut_in_the_same_way(tmp_path: Path) -> None:
    experiments = experiments_of(tmp_path, seed=list(range(7)))
    assert units_of(experiments, [], 3) == units_of(list(experiments), [], 3)
