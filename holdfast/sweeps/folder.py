"""The directory of a sweep: its cells, and the terms on which groups of them began.

sweep.json            every cell: label, folder and config; written first, the same for all shards
groups/000.json       cells that run together, and the plans, threads and device that their bits depend on
000-ditto_seed=0/     a cell, a run like any other (store.py)
data-3f9a2c1b77e0.safetensors   data that was handed over in Python, once for all cells
lock                  held while a process locks its cells or writes one of the above
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from holdfast.core.errors import ConfigError, RunError
from holdfast.core.files import HOST, as_json, lock, plain_disk_errors, unlock, write_if_absent, write_json
from holdfast.core.reading import read_json
from holdfast.data.handed.content import HandedOver
from holdfast.data.handed.kept import check_given, with_data
from holdfast.experiment.config import Config, completed, make_config
from holdfast.experiment.extension import check_extension, with_rounds
from holdfast.experiment.given_again import how_to_resume
from holdfast.experiment.manifest import (
    are_terms,
    are_words,
    folder_name,
    is_plan,
    read_manifest,
    run_folders,
    with_model_of,
    with_parts,
)
from holdfast.experiment.object_names import agree, unnamed
from holdfast.local.plan import Plan
from holdfast.storage.status import RunStatus, run_status
from holdfast.sweeps.grid import flatten

T = TypeVar("T")


@dataclass(frozen=True)
class CellFolder:
    """One cell of the sweep and its folder."""

    label: str
    path: Path
    config: Config

    def run_status(self) -> RunStatus:
        return run_status(self.path, self.label)

    def to_extend(self) -> bool:
        """Whether it was begun with fewer rounds than the sweep has now."""
        if not (self.path / "manifest.json").exists():
            return False
        return bool(read_manifest(self.path)["config"]["train"]["rounds"] < self.config.train.rounds)


@dataclass(frozen=True)
class Group:
    """Cells that run together from start to end, by folder name, and what their bits depend on besides the
    configs."""

    cells: tuple[str, ...]
    plans: tuple[Plan, ...]
    threads: int
    device: str
    torch: str


class SweepFolder:
    def __init__(self, path: Path, cells: Sequence[tuple[str, Config]]):
        self.path = Path(path)
        names = self._names([config for _, config in cells]) or [
            (label, folder_name(number, len(cells), label)) for number, (label, _) in enumerate(cells)
        ]
        self.cells = [
            CellFolder(label, self.path / folder, config)
            for (label, folder), (_, config) in zip(names, cells, strict=True)
        ]
        engines = {json.dumps(config.plain()["engine"], sort_keys=True) for _, config in cells}
        if len(engines) > 1:
            raise ConfigError(
                "sweep: experiments that run together share all settings of [engine]; do not sweep over"
                " engine"
            )

    def _names(self, configs: Sequence[Config]) -> list[tuple[str, str]]:
        """Return label and folder of every cell of the sweep that is there already, if it is this one: an
        earlier version may have labelled its cells in other words."""
        there = listed(self.path)
        here = [{"label": "", "config": json.loads(as_json(config.plain()))} for config in configs]
        plain = all(re.fullmatch(r"\d{3,9}(-[^/\0]*)?", cell["folder"]) for cell in there)
        if not plain or len(there) != len(here) or _other_setting(there, here):
            return []
        return [(cell["label"], cell["folder"]) for cell in there]

    def check(self) -> None:
        """Check that the directory is free or holds this sweep; a run or another sweep is refused, with the
        difference."""
        if (self.path / "manifest.json").exists():
            again = how_to_resume(self.path, read_manifest(self.path))
            raise ConfigError(
                f"{self.path} already holds a run; {again} continues it, or choose another --out"
            )
        there = read_json(self.path / "sweep.json")
        if there is None:
            if runs := run_folders(self.path):
                raise ConfigError(
                    f"{self.path} already holds runs ({runs[0].name}) that are not part of a sweep;"
                    " choose another --out"
                )
            return
        before = _listed(self.path, there)
        if [cell["label"] for cell in before] == [place.label for place in self.cells]:
            self.cells = [
                replace(place, config=with_model_of(completed(cell["config"]), place.config))
                for place, cell in zip(self.cells, before, strict=True)
            ]
        if difference := _difference(before, self._content()["cells"]):
            raise ConfigError(
                f"{self.path} holds another sweep: {difference}; give the config it began with, or choose"
                " another --out"
            )

    def write(self) -> None:
        """Write what the sweep is, unless another process has; then check that it is the same."""
        with plain_disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        write_if_absent(self.path / "sweep.json", self._content())
        self.check()

    def extend(self, rounds: int) -> None:
        """Give all cells more rounds; those that have begun are extended when they are continued."""
        before = sorted({place.config.train.rounds for place in self.cells})
        if len(before) > 1:
            raise ConfigError(
                f"rounds: the cells of {self.path} differ in train.rounds ({', '.join(map(str, before))});"
                " they cannot be extended together"
            )
        for place in self.cells:
            check_extension(place.path, place.config, rounds)
        self.cells = [replace(place, config=with_rounds(place.config, rounds)) for place in self.cells]
        with self.claim():
            write_json(self.path / "sweep.json", self._content())

    def _content(self) -> dict[str, Any]:
        return self.described(self.cells)

    @staticmethod
    def described(cells: Sequence[CellFolder]) -> dict[str, Any]:
        """What sweep.json holds of these cells."""
        listed = [
            {"label": place.label, "folder": place.path.name, "config": place.config.plain()}
            for place in cells
        ]
        written: dict[str, Any] = json.loads(as_json({"cells": listed}))
        return written

    def shard(self, number: int, of: int) -> list[CellFolder]:
        """Return the cells of one shard: blocks of nearly equal size, because neighbours in the grid are most
        alike and best trained together."""
        return block(self.cells, number, of)

    def groups(self) -> list[Group]:
        found = []
        for file in sorted((self.path / "groups").glob("*.json")):
            content = read_json(file) or {}
            if not self._is_group(content):
                raise RunError(
                    f"{file} is damaged: it does not hold the terms on which cells of this sweep began"
                )
            plans = tuple(Plan(**plan) for plan in content["plans"])
            found.append(
                Group(tuple(content["cells"]), plans, content["threads"], content["device"], content["torch"])
            )
        return found

    def _is_group(self, content: dict[str, Any]) -> bool:
        cells, plans = content.get("cells"), content.get("plans")
        if not are_words(cells) or not isinstance(plans, list) or not 0 < len(plans) == len(cells):
            return False
        known = {place.path.name for place in self.cells}.issuperset(cells)
        return (
            known
            and all(map(is_plan, plans))
            and are_terms(content.get("threads"), content.get("device"), content.get("torch"))
        )

    def write_group(self, group: Group) -> None:
        self.write_terms({**asdict(group), "plans": [asdict(plan) for plan in group.plans]})

    def write_terms(self, content: dict[str, Any]) -> None:
        """Write the file of a group, of which a process on another machine may have the terms."""
        with self.claim(), plain_disk_errors(self.path):
            (self.path / "groups").mkdir(exist_ok=True)
            write_json(self.path / self.group_file(content["cells"]), content)

    @staticmethod
    def group_file(cells: Sequence[str]) -> str:
        return f"groups/{cells[0].partition('-')[0]}.json"

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """Let one process at a time lock cells or write shared files, so that of two processes that want the
        same group one gets all of it."""
        with plain_disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / "lock"
        while True:
            handle = lock(file, wait=True)
            assert handle is not None
            try:
                # otherwise it was removed while we waited
                if file.exists() and os.fstat(handle).st_ino == file.stat().st_ino:
                    for folder in (self.path, self.path / "groups"):
                        # left by a killed process of this machine
                        for left_over in folder.glob(f".*.{HOST}.*.writing"):
                            left_over.unlink(missing_ok=True)
                    yield
                    return
            finally:
                unlock(handle)
            with plain_disk_errors(self.path):
                self.path.mkdir(parents=True, exist_ok=True)

    def give_up(self, fresh: Sequence[Path], group: Group | None) -> None:
        """Remove cells that failed before anything was committed, and the sweep if nothing else is left of
        it."""
        with self.claim():
            for folder in fresh:
                shutil.rmtree(folder, ignore_errors=True)
            if group is not None:
                (self.path / self.group_file(group.cells)).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                (self.path / "groups").rmdir()
            left = {file.name for file in self.path.iterdir() if not file.match("data-*.safetensors")}
            if left <= {"sweep.json", "lock"}:
                shutil.rmtree(self.path, ignore_errors=True)


def block(cells: list[T], number: int, of: int) -> list[T]:
    """Return one of `of` blocks of nearly equal size."""
    size = len(cells)
    return cells[(number - 1) * size // of : number * size // of]


def read_sweep(path: Path, data: Sequence[HandedOver] = ()) -> list[tuple[str, Config]]:
    """Return (label, config) of every cell, as the sweep began."""
    content = read_json(Path(path) / "sweep.json")
    if content is None:
        raise ConfigError(f"no sweep in {path}: it has no sweep.json")
    cells, plugins = [], _plugins(path)
    check_given([cell["config"] for cell in _listed(path, content)], path, data)
    for cell in _listed(path, content):
        if objects := unnamed(cell["config"]):
            again = f"call holdfast.sweep(config, out={str(path)!r}) with the same config again"
            raise ConfigError(f"{path}: {objects[0]} was a Python object; {again}")
        config = with_parts(partial(make_config, with_data(cell["config"], path, data)), path, plugins)
        cells.append((cell["label"], config))
    return cells


def listed(path: Path) -> list[dict[str, Any]]:
    """Return the cells of a sweep as it began: label, folder and plain config; empty where there is no
    sweep."""
    content = read_json(Path(path) / "sweep.json")
    return [] if content is None else _listed(path, content)


def _plugins(path: Path) -> list[str]:
    manifests = [read_manifest(folder) for folder in run_folders(path)]
    return sorted({file for manifest in manifests for file in manifest.get("plugins", [])})


def _listed(path: Path, content: dict[str, Any]) -> list[dict[str, Any]]:
    cells = content.get("cells")
    expected = {"label": str, "folder": str, "config": dict}
    if not isinstance(cells, list) or any(
        not isinstance(cell, dict)
        or any(not isinstance(cell.get(name), kind) for name, kind in expected.items())
        or not re.fullmatch(r"[^/\0]{1,255}", cell["folder"])
        for cell in cells
    ):
        raise RunError(f"{Path(path) / 'sweep.json'} is damaged: it does not list the cells")
    return cells


def _difference(there: list[dict[str, Any]], here: list[dict[str, Any]]) -> str:
    """Describe the first difference between two sweeps. Shards may run on different devices."""
    old, new = [cell["label"] for cell in there], [cell["label"] for cell in here]
    if old != new:
        only = [f"it has '{label}'" for label in old if label not in new] + [
            f"it has no '{label}'" for label in new if label not in old
        ]
        return f"{len(old)} cells, but the config gives {len(new)}" + (f" ({only[0]})" if only else "")
    return _other_setting(there, here)


def _other_setting(there: list[dict[str, Any]], here: list[dict[str, Any]]) -> str:
    """Describe the first setting in which two lists of cells differ."""
    for before, now in zip(there, here, strict=True):
        was, wanted = flatten(json.loads(as_json(completed(before["config"])))), flatten(now["config"])
        for key in dict.fromkeys([*was, *wanted]):
            if key != "engine.device" and not agree(was.get(key), wanted.get(key)):
                return f"{key} is {was.get(key)!r} in its cell '{before['label']}', here {wanted.get(key)!r}"
    return ""
