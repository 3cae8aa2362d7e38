"""A reproduction on disk: played, read back, and written down.

    study.json    what was asked for, and the study as it was then
    data.json     how much of which data it used
    runs/         the experiments: one sweep, or, where seconds are the result, runs that were played one
                  after the other
    report.html, table.md, table.csv, table.tex    what came out (holdfast/reproduction/page.py)

The same call starts, continues or completes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from holdfast.core.errors import ConfigError, RunError
from holdfast.core.files import as_json, clean, write_atomically, write_json
from holdfast.core.keys import Key
from holdfast.core.reading import is_number, is_whole, read_json
from holdfast.data.federation import build_federation
from holdfast.experiment.manifest import are_words, folder_name, run_folders
from holdfast.experiment.runner import Watch
from holdfast.reproduction.claims import Finding, examine
from holdfast.reproduction.experiments import Grid, Wanted
from holdfast.reproduction.study import Study, make
from holdfast.reproduction.values import Place, Values, ours, place, printed
from holdfast.results.run import Run
from holdfast.storage.status import run_status
from holdfast.sweeps.runner import sweep
from holdfast.sweeps.session import resume, start


@dataclass(frozen=True)
class Outcome:
    path: Path
    grid: Grid

    @property
    def study(self) -> Study:
        return self.grid.study

    @cached_property
    def runs(self) -> dict[Place, list[Run | None]]:
        """By place, a run for each seed; None where it has not finished."""
        by_config: dict[str, Run] = {}
        for folder in run_folders(self.path / "runs"):
            run = Run(folder)
            if (folder / "result.json").exists():
                by_config[_key(run.manifest["config"])] = run
        found: dict[Place, list[Run | None]] = {}
        for cell in self.grid.cells:
            found.setdefault(place("", cell.at), []).append(by_config.get(_key(cell.config.plain())))
        return found

    @cached_property
    def ours(self) -> Values:
        return ours(self.grid, self.runs)

    @cached_property
    def printed(self) -> Values:
        return printed(self.study, self.ours.labels)

    @cached_property
    def findings(self) -> list[tuple[Finding, Finding]]:
        """Every claim, in our figures and in the printed ones."""
        return [
            (examine(claim, self.ours, self.printed), examine(claim, self.printed, self.printed))
            for claim in self.study.claims
        ]

    @cached_property
    def data(self) -> list[dict[str, Any]]:
        """What was used of each dataset; empty where nothing was played to the end."""
        found = (read_json(self.path / "data.json") or {}).get("data", [])
        if not isinstance(found, list) or not all(map(_is_used, found)):
            raise RunError(f"{self.path / 'data.json'} is damaged: 'data' cannot be read")
        return found

    @property
    def missing(self) -> int:
        """Experiments that have no result, also those that failed."""
        return sum(run is None for seeds in self.runs.values() for run in seeds)

    @property
    def played(self) -> list[Run]:
        return list(
            {run.path: run for seeds in self.runs.values() for run in seeds if run is not None}.values()
        )


def _key(config: Mapping[str, Any]) -> str:
    """An experiment, wherever it is played."""
    content = json.loads(as_json(config))
    content["data"].pop("dir", None)
    return json.dumps({name: part for name, part in content.items() if name != "engine"}, sort_keys=True)


def reproduce(
    study: Study,
    wanted: Wanted,
    out: Path,
    watch: Callable[[], Watch] | None = None,
    plugins: Sequence[str] = (),
    retry: bool = False,
) -> Outcome:
    """Play what is left of it, and read it."""
    grid = Grid(study, wanted)
    content = clean(
        {"study": study.model_dump(mode="json", exclude_defaults=True), "wanted": asdict(grid.wanted)}
    )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be made: {error.strerror}") from None
    there = _asked(out)
    if there is not None and _planned(there, out) != _planned(content, out):
        raise ConfigError(
            f"{out} holds another reproduction ({there['study']['key']}, or other options); choose another"
            " --out"
        )
    if there is None and run_folders(out):
        raise ConfigError(f"{out} holds runs already; choose another --out")
    write_atomically(
        out / "study.json", json.dumps(content, indent=1).encode()
    )  # in order: what comes first in an axis means something
    follow = watch or Watch
    if study.fused:
        sweep(grid.to_run(), out / "runs", follow(), plugins, retry=retry)
    else:
        _one_by_one(grid, out / "runs", follow, plugins)
    outcome = Outcome(out, grid)
    write_json(out / "data.json", {"data": used(grid)})
    return outcome


def used(grid: Grid) -> list[dict[str, Any]]:
    """Clients, rounds and samples of every dataset, told once for all that the same data is dealt to."""
    found: dict[str, dict[str, Any]] = {}
    for cell in grid.cells:
        config = cell.config
        told = [config.data.model_dump(mode="json"), config.train.rounds, config.train.participation]
        kind = json.dumps(told, sort_keys=True, default=str)
        if cell.seed or kind in found:
            continue
        federation = build_federation(config.data, Key(config.seed).fold("data"))
        tables = (federation.train, federation.validation, federation.test)
        held = len(torch.cat([table.row for table in tables]).unique())  # a sample may be dealt to several
        found[kind] = {
            "dataset": federation.samples.name,
            "clients": federation.clients,
            "rounds": config.train.rounds,
            "participation": config.train.participation,
            "samples": held,
            "of": len(federation.samples),
        }
    return list({json.dumps(one): one for one in found.values()}.values())


def _planned(content: Mapping[str, Any], path: Path) -> Any:
    """What is played: which figures of which cells. How a study is worded may change meanwhile, and so may
    where it is played."""
    wanted = {**content["wanted"], "changes": []}
    wanted["variant"] = Wanted(variant=wanted["variant"]).variant
    try:
        cells = sorted(
            [*sorted(cell.at.items()), (_key(cell.config.plain()), "")] for cell in _grid(content, path).cells
        )
    except ConfigError as error:  # of a version that could say what this one cannot
        return str(error)
    return [content["study"]["key"], wanted, cells]


def _grid(content: Mapping[str, Any], path: Path) -> Grid:
    """The experiments that a folder was made for."""
    wanted = content["wanted"]
    changes = tuple((key, value) for key, value in wanted["changes"])
    try:
        return Grid(
            make(content["study"]), Wanted(**{**wanted, "only": tuple(wanted["only"]), "changes": changes})
        )
    except ConfigError as error:
        raise ConfigError(f"{path / 'study.json'}: {error}") from None


def _one_by_one(grid: Grid, out: Path, follow: Callable[[], Watch], plugins: Sequence[str]) -> None:
    """Experiments that are played together share their time; where time is the result each has the machine
    for itself."""
    cells = grid.to_run()
    for number, (label, config) in enumerate(cells):
        folder = out / folder_name(number, len(cells), label)
        if run_status(folder, label).done:
            continue
        if (folder / "head.json").exists():
            resume(folder, follow(), plugins=plugins)
        else:
            start([(label, config)], folder, follow(), plugins)


def read_outcome(path: Path) -> Outcome:
    """From its directory alone."""
    content = _asked(Path(path))
    if content is None:
        raise ConfigError(f"no reproduction in {path}: it has no study.json")
    return Outcome(Path(path), _grid(content, Path(path)))


def _asked(path: Path) -> dict[str, Any] | None:
    """What a folder was made for; None where it says nothing."""
    content = read_json(path / "study.json")
    if content is not None:
        study, wanted = content.get("study"), content.get("wanted")
        good = {
            "study": isinstance(study, dict) and isinstance(study.get("key"), str),
            "wanted": _is_wanted(wanted),
        }
        if broken := [name for name, fits in good.items() if not fits]:
            raise RunError(f"{path / 'study.json'} is damaged: '{broken[0]}' cannot be read")
    return content


def _is_used(value: Any) -> bool:
    """Whether an entry of a file says what was used of a dataset, as `used` does."""
    if not isinstance(value, dict) or not isinstance(value.get("dataset"), str):
        return False
    counts = all(is_whole(value.get(name), most=10**15) for name in ("clients", "rounds", "samples", "of"))
    return counts and value["of"] > 0 and is_number(value.get("participation"))


def _is_wanted(value: Any) -> bool:
    """Whether a table from a file holds the options of a reproduction, as `reproduce` writes them."""
    if not isinstance(value, dict) or value.keys() != Wanted.__dataclass_fields__.keys():
        return False
    changes = value["changes"]
    sound = all(isinstance(value[name], str) for name in ("scale", "variant")) and isinstance(
        value["stand_ins"], bool
    )
    sound = (
        sound and is_whole(value["seeds"], least=1) and are_words(value["only"]) and isinstance(changes, list)
    )
    return sound and all(
        isinstance(one, list) and len(one) == 2 and isinstance(one[0], str) for one in changes
    )


def is_reproduction(path: Path) -> bool:
    return (Path(path) / "study.json").exists()
