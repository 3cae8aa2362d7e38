"""The curves of a sweep as one figure: a panel for each attack, a line for each setting."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import ConfigError, suggest
from holdfast.core.notebook_figure import shown_in_notebooks
from holdfast.interactive.figure import curve_figure, is_share
from holdfast.report.axis import Axis, nice_ticks, worth_seeing
from holdfast.report.drawing import Drawing, figure_of
from holdfast.report.plots import draw_curves
from holdfast.report.read_runs import SettingRuns
from holdfast.report.settings_by_attack import HIGHLIGHTED, Faced, SettingsByAttack

Choice = Sequence[str] | Callable[[str], bool] | None
Panels = list[tuple[str, list[Faced]]]
_ACROSS = 3  # panels beside each other


@dataclass(frozen=True)
class Look:
    """How a figure of a sweep is drawn; the arguments of `Sweep.plot` say what each means."""

    lines: Choice = None
    panels: bool | None = None
    names: Mapping[str, str] | None = None
    size: tuple[float, float] | None = None


def sweep_figure(lines: Sequence[SettingRuns], metric: str, look: Look) -> Any:
    """The figure of the chosen lines."""
    chosen = _chosen(lines, look.lines)
    by_attack = SettingsByAttack(chosen)
    panels = by_attack.panels
    _check_names(look.names, [one for _, faced in panels for one in faced])
    one_chart = len(panels) == 1 if look.panels is None else not look.panels
    most = len(chosen) if one_chart else max(len(faced) for _, faced in panels)
    if most > HIGHLIGHTED:
        warnings.warn(
            f"plot: one chart has {most} lines, more than can be told apart; choose some,"
            f" plot(lines=[{chosen[0].label!r}, ...]) or plot(lines=lambda label: 'ipm' in label)",
            stacklevel=3,
        )
    if one_chart:
        known = {one.line.label: one for one in by_attack.faced}
        curves = [(_name(known[line.label], look, line.label), line.curve(metric)) for line in chosen]
        return curve_figure(curves, metric, [metric], look.size)
    return shown_in_notebooks(figure_of([_in_panels(panels, by_attack, metric, look)]))


def _chosen(lines: Sequence[SettingRuns], choice: Choice) -> list[SettingRuns]:
    """The lines that a list of labels names, in its order, or for whose label a function is true."""
    if choice is None:
        return list(lines)
    labels = [line.label for line in lines]
    if callable(choice):
        found = [line for line in lines if choice(line.label)]
        if not found:
            raise ConfigError(f"plot: no label fits lines=; the labels are {', '.join(labels)}")
        return found
    wanted = [choice] if isinstance(choice, str) else list(choice)
    for label in wanted:
        if label not in labels:
            raise ConfigError(
                f"plot: lines has '{label}', which is no label of this sweep{suggest(label, labels)}"
            )
    if not wanted:
        raise ConfigError("plot: lines is empty; name at least one label, or leave it out")
    return [lines[labels.index(label)] for label in wanted]


def _check_names(names: Mapping[str, str] | None, faced: Sequence[Faced]) -> None:
    known = dict.fromkeys(name for one in faced for name in (one.line.label, one.setting, one.attack))
    for name in names or {}:
        if name not in known:
            raise ConfigError(
                f"plot: names renames '{name}', which is no label of this figure{suggest(name, list(known))}"
            )


def _name(one: Faced, look: Look, otherwise: str) -> str:
    """What the figure calls a line: the new name of its label, with or without the attack, if it has one."""
    names = look.names or {}
    return names.get(one.line.label, names.get(one.setting, otherwise))


def _in_panels(panels: Panels, by_attack: SettingsByAttack, metric: str, look: Look) -> Drawing:
    """Panels that share both axes, with one legend for all; a setting has one colour throughout."""
    points = [point for _, faced in panels for one in faced for point in one.line.curve(metric)]
    if not points:
        raise ConfigError(f"plot: no round has a value of '{metric}' yet")
    percent = is_share(metric)
    axis = Axis(nice_ticks(*worth_seeing(points, percent))) if percent else Axis.over(points)
    across = min(_ACROSS, len(panels))
    down = -(-len(panels) // across)

    def draw(figure: Any) -> None:
        grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
        entries: dict[str, Any] = {}
        for axes, (title, faced) in zip(grid.flat, panels, strict=False):
            curves = [(_name(one, look, one.setting), one.line.curve(metric)) for one in faced]
            draw_curves(axes, curves, percent, axis, [by_attack.place(one.line) for one in faced])
            axes.set_title((look.names or {}).get(title, title), fontsize=9, loc="left")
            handles, names = axes.get_legend_handles_labels()
            entries |= {name: handle for handle, name in zip(handles, names, strict=True)}
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for axes in grid.flat[max(0, len(panels) - across) : len(panels)]:
            axes.set_xlabel("round")
            axes.tick_params(labelbottom=True)
        for row in grid:
            row[0].set_ylabel(metric)
        figure.legend(
            entries.values(), entries.keys(), frameon=False, fontsize=8, loc="outside lower center", ncols=3
        )

    size = look.size or (1.2 + 2.9 * across, 0.7 + 2.5 * down + 0.17 * len(by_attack.settings) / 3)
    return Drawing(f"{metric} by round", size, draw)
