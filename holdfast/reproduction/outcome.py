"""A reproduction on disk: runs the experiments of a study and reads them back.

    study.json    what was asked for, and the study as it was then
    data.json     how much of which data it used
    runs/         the experiments: one sweep or, where time is the result, separate runs, one after the other
    report.html, table.md, table.csv, table.tex    the results (holdfast/reproduction/page.py)

The same call starts or continues a reproduction."""

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
from holdfast.experiment.runner import RunCallbacks
from holdfast.reproduction.claims import ClaimResult, examine
from holdfast.reproduction.experiments import StudyGrid, StudyRequest
from holdfast.reproduction.study import Study, make
from holdfast.reproduction.values import Place, Values, ours, place, printed
from holdfast.results.run import Run
from holdfast.storage.status import run_status
from holdfast.sweeps.runner import Launcher, sweep
from holdfast.sweeps.session import resume, start


@dataclass(frozen=True)
class Outcome:
    """A reproduction with its results, as far as they are there."""

    path: Path
    grid: StudyGrid

    @property
    def study(self) -> Study:
        return self.grid.study

    @cached_property
    def runs(self) -> dict[Place, list[Run | None]]:
        """A run for each seed, by place; None where it has not finished."""
        by_config: dict[str, Run] = {}
        for folder in run_folders(self.path / "runs"):
            run = Run(folder)
            if (folder / "result.json").exists():
                by_config[_key(run.manifest["config"])] = run
        found: dict[Place, list[Run | None]] = {}
        for planned in self.grid.planned_runs:
            found.setdefault(place("", planned.at), []).append(by_config.get(_key(planned.config.plain())))
        return found

    @cached_property
    def ours(self) -> Values:
        return ours(self.grid, self.runs)

    @cached_property
    def printed(self) -> Values:
        return printed(self.study, self.ours.labels)

    @cached_property
    def claim_results(self) -> list[tuple[ClaimResult, ClaimResult]]:
        """Every claim, checked on our numbers and on the published ones."""
        return [
            (examine(claim, self.ours, self.printed), examine(claim, self.printed, self.printed))
            for claim in self.study.claims
        ]

    @cached_property
    def data(self) -> list[dict[str, Any]]:
        """How much of each dataset was used; empty where no experiment has finished."""
        found = (read_json(self.path / "data.json") or {}).get("data", [])
        if not isinstance(found, list) or not all(map(_is_used, found)):
            raise RunError(f"{self.path / 'data.json'} is damaged: 'data' cannot be read")
        return found

    @property
    def missing(self) -> int:
        """The number of experiments without a result, failed ones included."""
        return sum(run is None for seeds in self.runs.values() for run in seeds)

    @property
    def finished_runs(self) -> list[Run]:
        return list(
            {run.path: run for seeds in self.runs.values() for run in seeds if run is not None}.values()
        )


def _key(config: Mapping[str, Any]) -> str:
    """Identify an experiment by its config, without the device and folder it runs with."""
    content = json.loads(as_json(config))
    content["data"].pop("dir", None)
    return json.dumps({name: part for name, part in content.items() if name != "engine"}, sort_keys=True)


def reproduce(
    study: Study,
    request: StudyRequest,
    out: Path,
    watch: Callable[[], RunCallbacks] | None = None,
    plugins: Sequence[str] = (),
    retry: bool = False,
    launcher: Launcher | None = None,
) -> Outcome:
    """Run the experiments that are left, and read all of them. A `launcher` runs them in other processes,
    except where time is the result."""
    grid = StudyGrid(study, request)
    content = clean(
        {"study": study.model_dump(mode="json", exclude_defaults=True), "wanted": asdict(grid.request)}
    )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot create the folder: {error.strerror}") from None
    there = _asked(out)
    if there is not None and _planned(there, out) != _planned(content, out):
        raise ConfigError(
            f"{out} holds another reproduction ({there['study']['key']}, or other options); choose another"
            " --out"
        )
    if there is None and run_folders(out):
        raise ConfigError(f"{out} already holds runs; choose another --out")
    write_atomically(
        out / "study.json", json.dumps(content, indent=1).encode()
    )  # keeps the order of the labels, which has a meaning
    follow = watch or RunCallbacks
    if study.fused:
        sweep(grid.to_run(), out / "runs", follow(), plugins, retry=retry, launcher=launcher)
    else:
        _one_by_one(grid, out / "runs", follow, plugins)
    outcome = Outcome(out, grid)
    write_json(out / "data.json", {"data": used(grid)})
    return outcome


def used(grid: StudyGrid) -> list[dict[str, Any]]:
    """Return clients, rounds and samples of every dataset, once for all experiments with the same
    partition."""
    found: dict[str, dict[str, Any]] = {}
    for planned in grid.planned_runs:
        config = planned.config
        same = [config.data.model_dump(mode="json"), config.train.rounds, config.train.participation]
        kind = json.dumps(same, sort_keys=True, default=str)
        if planned.seed or kind in found:
            continue
        federation = build_federation(config.data, Key(config.seed).fold("data"))
        tables = (federation.train, federation.validation, federation.test)
        # several clients may hold the same sample
        held = len(torch.cat([table.row for table in tables]).unique())
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
    """Return what identifies a reproduction: its experiments and their places. Texts of a study may change,
    and so may the device."""
    request = {**content["wanted"], "changes": []}
    request["variant"] = StudyRequest(variant=request["variant"]).variant
    try:
        cells = sorted(
            [*sorted(planned.at.items()), (_key(planned.config.plain()), "")]
            for planned in _grid(content, path).planned_runs
        )
    except ConfigError as error:  # written by a version with other settings
        return str(error)
    return [content["study"]["key"], request, cells]


def _grid(content: Mapping[str, Any], path: Path) -> StudyGrid:
    """Return the experiments of a reproduction that was saved."""
    request = content["wanted"]
    changes = tuple((key, value) for key, value in request["changes"])
    try:
        return StudyGrid(
            make(content["study"]),
            StudyRequest(**{**request, "only": tuple(request["only"]), "changes": changes}),
        )
    except ConfigError as error:
        raise ConfigError(f"{path / 'study.json'}: {error}") from None


def _one_by_one(
    grid: StudyGrid, out: Path, follow: Callable[[], RunCallbacks], plugins: Sequence[str]
) -> None:
    """Run the experiments separately. Experiments that run together share their time; where time is the
    result, each needs the machine for itself."""
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
    """Read a reproduction from its directory."""
    content = _asked(Path(path))
    if content is None:
        raise ConfigError(f"no reproduction in {path}: it has no study.json")
    return Outcome(Path(path), _grid(content, Path(path)))


def _asked(path: Path) -> dict[str, Any] | None:
    """Read the study and the request of a saved reproduction; None if there is none."""
    content = read_json(path / "study.json")
    if content is not None:
        study, request = content.get("study"), content.get("wanted")
        good = {
            "study": isinstance(study, dict) and isinstance(study.get("key"), str),
            "wanted": _is_wanted(request),
        }
        if broken := [name for name, fits in good.items() if not fits]:
            raise RunError(f"{path / 'study.json'} is damaged: '{broken[0]}' cannot be read")
    return content


def _is_used(value: Any) -> bool:
    """Whether an entry of data.json has the form that `used` writes."""
    if not isinstance(value, dict) or not isinstance(value.get("dataset"), str):
        return False
    counts = all(is_whole(value.get(name), most=10**15) for name in ("clients", "rounds", "samples", "of"))
    return counts and value["of"] > 0 and is_number(value.get("participation"))


def _is_wanted(value: Any) -> bool:
    """Whether a table of study.json has the form of the options that `reproduce` writes."""
    if not isinstance(value, dict) or value.keys() != StudyRequest.__dataclass_fields__.keys():
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
