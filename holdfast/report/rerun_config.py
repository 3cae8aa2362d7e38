"""How to get the same runs again: one config file that expands to exactly these runs, checked by expanding
it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.registry import plugin_options
from holdfast.core.toml import key, to_toml, value
from holdfast.data.handed.kept import handed_in
from holdfast.experiment.config import Config, make_config
from holdfast.experiment.config_tables import PART_SECTIONS
from holdfast.experiment.given_again import arguments
from holdfast.experiment.object_names import unnamed
from holdfast.report.read_runs import RunRecord
from holdfast.sweeps.grid import expand, flatten

Flat = dict[str, Any]


def config_text(cells: Sequence[RunRecord]) -> str | None:
    """TOML for all of them; None when no [sweep] says the same (runs of different sweeps, objects without a
    name)."""
    if len(cells) == 1 and unnamed(cells[0].config):
        return as_text(without_defaults(cells[0].config))  # the command gives the objects
    try:
        configs = [cell.run.config.plain() for cell in cells]
        if len({str(handed_in(config)) for config in configs}) > 1:
            return None  # a file cannot name data that was handed over
        table = _table(configs)
        if table is None:
            return None
        made = [make_config(t).plain() for _, t in expand(table)]
    except HoldfastError:
        return None
    if sorted(map(_text, made)) != sorted(map(_text, configs)):
        return None
    return as_text(table)


def as_text(table: Mapping[str, Any]) -> str:
    """A config table, which may have a sweep, as TOML."""
    once = {name: given for name, given in table.items() if name != "sweep"}
    return to_toml(once) + (_sweep_text(dict(table["sweep"])) if table.get("sweep") else "")


def command(cells: Sequence[RunRecord]) -> str:
    """With the plan, the threads and the worker processes that the bits depend on."""
    manifest = cells[0].manifest
    plan, threads = manifest["plan"], manifest["threads"]
    digest, objects = handed_in(manifest["config"]), _objects(cells)
    if digest or objects:
        start = "run" if len(cells) == 1 or objects else "sweep"
        engine = {"plan": plan["name"], "threads": threads, "workers": plan.get("workers", 1)}
        given = [*objects, *["data=data"] * bool(digest), f"engine={json.dumps(engine)}"]
        again = f'holdfast.{start}("config.toml", {", ".join(given)})'
        return f"{again}  # in Python" + (f", with the data of digest {str(digest)[:12]}" if digest else "")
    words = [
        "holdfast run config.toml",
        f"--plan {plan['name']}",
        f"--set engine.threads={threads}",
        f"--workers {plan.get('workers', 1)}",
    ]
    return " ".join(words) + plugin_options(manifest.get("plugins", []))


def _objects(cells: Sequence[RunRecord]) -> list[str]:
    """The arguments for Python objects that the runs were given; where runs differ, one for each section."""
    said = {argument.partition("=")[0]: argument for cell in cells for argument in arguments(cell.config)}
    same = all(arguments(cell.config) == arguments(cells[0].config) for cell in cells)
    return [argument if same else f"{section}=..." for section, argument in said.items()]


def without_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """What a config says beyond the defaults; sections that are left empty go too."""
    default = Config().plain()
    out: dict[str, Any] = {}
    for name, given in config.items():
        if given == default[name]:
            continue
        if isinstance(given, dict) and isinstance(default[name], dict) and name not in ("method", "model"):
            given = {k: v for k, v in given.items() if k not in default[name] or v != default[name][k]}
        out[name] = given
    return out


def _table(configs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The config of one run, or a grid: keys that all have and that differ are its axes, what else differs
    becomes overrides."""
    if len(configs) == 1:
        return without_defaults(configs[0])
    flats = [_spelt(config) for config in configs]
    paths = list(dict.fromkeys(path for flat in flats for path in flat))
    varying = [p for p in paths if len({_text(flat.get(p)) for flat in flats}) > 1]
    chosen = {p.removesuffix("name") for p in varying if p.endswith(".name")}
    varying = [
        p for p in paths if p in varying or f"{p.rpartition('.')[0]}." in chosen
    ]  # the part and all its settings
    axes = {
        p: _distinct(flat[p] for flat in flats)
        for p in varying
        if all(flat.get(p) is not None for flat in flats)
    }
    grid = {p: values for p, values in axes.items() if p == "seed" or p.endswith(".name")} or axes
    for extra in [p for p in axes if p not in grid]:
        if len({_text([flat[p] for p in grid]) for flat in flats}) == len(flats):
            break
        grid[extra] = axes[extra]
    if "seed" in grid:
        grid["seed"] = grid.pop("seed")  # last, as one writes it
    if len(configs) != len(list(itertools.product(*grid.values()))):
        return None
    base = without_defaults(_without(configs[0], varying))
    overrides = [o for p in varying if p not in grid for o in _overrides(p, flats, grid)]
    return {**base, "sweep": {**grid, **({"override": overrides} if overrides else {})}}


def _overrides(path: str, flats: list[Flat], grid: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """One per value of the axis that decides this key, or one per cell when no single axis does."""
    deciding = [
        axis
        for axis in grid
        if all(len({_text(f.get(path)) for f in flats if f[axis] == v}) == 1 for v in grid[axis])
    ]
    names = deciding[:1] or list(grid)
    cells = {_text([f[n] for n in names]): f for f in flats if f.get(path) is not None}
    return [{"when": {n: f[n] for n in names}, "set": {path: f[path]}} for f in cells.values()]


def _sweep_text(sweep: dict[str, Any]) -> str:
    overrides = sweep.pop("override", [])
    text = "\n" + to_toml({"sweep": sweep})
    for override in overrides:
        text += "\n[[sweep.override]]\n" + "".join(f"{key(k)} = {value(v)}\n" for k, v in override.items())
    return text


def _spelt(config: dict[str, Any]) -> Flat:
    """Values by dotted path; a part given by its name alone is spelt as a table, and no attack has a name
    too."""
    config = {**config, "attack": "none" if config["attack"] is None else config["attack"]}
    named = {
        path
        for path, given in flatten(config).items()
        if path.rpartition(".")[2] in PART_SECTIONS and isinstance(given, str)
    }
    return {f"{path}.name" if path in named else path: given for path, given in flatten(config).items()}


def _without(table: dict[str, Any], paths: Sequence[str], prefix: str = "") -> dict[str, Any]:
    out = {}
    for name, given in table.items():
        path = prefix + name
        if path in paths or f"{path}.name" in paths:
            continue
        out[name] = _without(given, paths, path + ".") if isinstance(given, dict) else given
    return out


def _distinct(values: Any) -> list[Any]:
    return list({_text(v): v for v in values}.values())


def _text(given: Any) -> str:
    return json.dumps(given, sort_keys=True)
