"""The units of a sweep that is divided over devices: which cells train as one stack, and how they are cut.

A unit is handed to one process as a whole. Cells that have begun together stay one unit, because on plan
`vmap` the last bits of a cell depend on the others in its stack. What has not begun is one unit for each
stack. Where that gives fewer units than there are devices, the units that are predicted to take longest are
cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.experiment.loop import Experiment
from holdfast.experiment.planner import client_steps
from holdfast.sweeps.folder import Group


@dataclass(frozen=True)
class Unit:
    """Cells that one process trains together, by folder name, in the order of the sweep."""

    cells: tuple[str, ...]
    costs: tuple[float, ...]
    """The predicted cost of each cell."""
    begun: Group | None = None
    """The terms on which they began; None if none has."""

    @property
    def cost(self) -> float:
        return sum(self.costs)


def cost_of(experiment: Experiment) -> float:
    """A prediction for comparisons only: the steps that are left, times the size of the model."""
    done = max(0, experiment.store.round() or 0)
    left = max(0.0, 1.0 - done / max(1, experiment.rounds))
    return client_steps(experiment) * left * experiment.initial.numel()


def units_of(experiments: Sequence[Experiment], groups: Sequence[Group], slots: int) -> list[Unit]:
    """The units of these experiments for so many devices, the costliest first."""
    by_name = {experiment.out.name: experiment for experiment in experiments}
    begun, grouped = [], set[str]()
    for group in groups:
        grouped |= set(group.cells)
        names = tuple(name for name in group.cells if name in by_name)
        if names:
            begun.append(Unit(names, tuple(cost_of(by_name[name]) for name in names), group))
    stacks: dict[tuple[object, ...], list[Experiment]] = {}
    for name, experiment in by_name.items():
        if name not in grouped:
            stacks.setdefault(experiment.run_context.group("train"), []).append(experiment)
    fresh = [
        Unit(tuple(one.out.name for one in stack), tuple(map(cost_of, stack))) for stack in stacks.values()
    ]
    return sorted([*begun, *cut(fresh, slots - len(begun))], key=lambda unit: (-unit.cost, unit.cells))


def cut(units: Sequence[Unit], slots: int) -> list[Unit]:
    """Cut units until there is one for every device, or every cell is a unit of its own."""
    parts = [1] * len(units)
    while sum(parts) < slots:
        able = [place for place, unit in enumerate(units) if parts[place] < len(unit.cells)]
        if not able:
            break
        parts[max(able, key=lambda place: (units[place].cost / parts[place], -place))] += 1
    return [piece for unit, many in zip(units, parts, strict=True) for piece in _pieces(unit, many)]


def _pieces(unit: Unit, parts: int) -> list[Unit]:
    """The unit in so many parts of nearly equal cost: the costliest cell goes to the part with the least."""
    if parts == 1:
        return [unit]
    shares: list[list[int]] = [[] for _ in range(parts)]
    for place in sorted(range(len(unit.cells)), key=lambda place: (-unit.costs[place], place)):
        least = min(shares, key=lambda share: (sum(unit.costs[p] for p in share), len(share)))
        least.append(place)
    return [
        replace(
            unit,
            cells=tuple(unit.cells[place] for place in sorted(share)),
            costs=tuple(unit.costs[place] for place in sorted(share)),
        )
        for share in sorted(shares, key=min)
    ]
