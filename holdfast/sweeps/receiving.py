"""Rounds that come back from workers are committed in the directory of the sweep, as storage/store.py says:
everything that a head names is on the disk before the head is renamed, and the heads of cells that were
trained as one stack are renamed together.

Private rows get the places in the file that the worker has for them, if these are free here; the committed
rows stay until the new head is renamed. So the order of the records may differ from that of a sweep on one
machine where rounds came back in between; the rows do not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from holdfast.core.errors import RunError, in_print
from holdfast.core.files import write_atomically
from holdfast.core.reading import is_whole, parse_json
from holdfast.core.types import State
from holdfast.experiment.loop import Experiment
from holdfast.experiment.manifest import are_terms, are_words, is_plan
from holdfast.storage.checks import broken_part, broken_result
from holdfast.storage.client_state import RowStore
from holdfast.storage.status import forget_failure
from holdfast.storage.store import PreparedRound, Store, commit_all
from holdfast.sweeps.folder import SweepFolder
from holdfast.sweeps.parcels import Files
from holdfast.sweeps.sending import ROWS, STATE


class Receiver:
    """Writes what comes back of cells whose locks this process holds."""

    def __init__(
        self, folder: SweepFolder, experiments: Mapping[str, Experiment], plugins: Mapping[str, str]
    ):
        self.folder, self.plugins = folder, plugins
        """Of the plug-ins, the files here by their digest: a worker has them under other names."""
        self._stores = {name: experiment.store for name, experiment in experiments.items()}
        self._rows = {name: _rows_of(store) for name, store in self._stores.items()}

    def receive(self, files: Files, cells: Collection[str]) -> list[str]:
        """Write what a worker sent of these cells, which it was given; return the cells of which something
        was new."""
        by_cell: dict[str, Files] = {name: {} for name in cells}
        for name, content in files.items():
            place, _, file = name.partition("/")
            if place == "groups":
                self._write_group(file, content, cells)
            elif place in by_cell:
                by_cell[place][file] = content
            else:
                raise RunError(f"a worker sent {in_print(name)[:100]}, which it was not given")
        found = {name: sent for name, sent in by_cell.items() if sent}
        for name, sent in found.items():
            self._write_first(name, sent)
        if ready := [self._prepared(name, sent) for name, sent in found.items() if STATE in sent]:
            commit_all(ready)
        for name, sent in found.items():
            self._write_last(name, sent)
        return list(found)

    def _write_group(self, file: str, content: bytes, cells: Collection[str]) -> None:
        """The terms on which these cells began: what any process needs that continues them."""
        group = _json(content, f"groups/{file}")
        plans = group.get("plans")
        sound = (
            isinstance(plans, list)
            and all(map(is_plan, plans))
            and are_words(group.get("cells"))
            and set(group["cells"]) <= set(cells)
            and len(plans) == len(group["cells"]) > 0
            and are_terms(group.get("threads"), group.get("device"), group.get("torch"))
        )
        if not sound:
            raise RunError(f"a worker sent groups/{in_print(file)[:100]} without the terms of its cells")
        self.folder.write_terms(group)

    def _write_first(self, name: str, sent: Files) -> None:
        path = self.folder.path / name
        if STATE in sent:
            forget_failure(path)
        if "manifest.json" in sent:
            manifest = _json(sent["manifest.json"], f"{name}/manifest.json")
            manifest["plugins"] = sorted(
                {self.plugins.get(Path(p).parent.name, p) for p in manifest["plugins"]}
            )
            self._stores[name].write_json("manifest.json", manifest)
        if "start.safetensors" in sent:
            write_atomically(path / "start.safetensors", sent["start.safetensors"])

    def _prepared(self, name: str, sent: Files) -> PreparedRound:
        """The rounds of one cell, to be committed by the rename of its head."""
        store, rows = self._stores[name], self._rows[name]
        parts = {file: content for file, content in sent.items() if file.startswith("parts/")}
        state = _tensors(sent[STATE], f"{name}/{STATE}")
        places = RowStore(rows.path, state["rows/index"]).place  # checked
        round = _last_round(parts, name, store.round())
        rows.begin()
        if ROWS in sent:
            changed = _tensors(sent[ROWS], f"{name}/{ROWS}")
            ids = changed.pop("ids")
            values = {key.removeprefix("row/"): value for key, value in changed.items()}
            rows.stage(ids, values, places)
        index = rows.index()
        if index[:, 0].tolist() != sorted(places):
            raise RunError(f"{name}: a worker sent round {round} without the private rows that belong to it")
        same = torch.equal(index, state["rows/index"])
        content: dict[str, bytes | State] = {
            **{file: parts[file] for file in sorted(parts)},
            store.state_file(round): sent[STATE] if same else {**state, "rows/index": index},
        }
        return PreparedRound(store, round, rows, content, (rows.file,) if rows.staged else ())

    def _write_last(self, name: str, sent: Files) -> None:
        """What says that a cell has ended, after its last round is committed."""
        path = self.folder.path / name
        if "result.json" in sent:
            result = _json(sent["result.json"], f"{name}/result.json") | {"run_dir": str(path)}
            if broken := broken_result(result):
                raise RunError(f"a worker sent {name}/result.json with a damaged '{broken}'")
            self._stores[name].write_json("result.json", result)
        if "traceback.txt" in sent:
            write_atomically(path / "traceback.txt", sent["traceback.txt"])
        if "failure.json" in sent:
            self._stores[name].write_json("failure.json", _json(sent["failure.json"], f"{name}/failure.json"))


def _rows_of(store: Store) -> RowStore:
    head = store.head()
    return RowStore(store.path / "rows", None if head is None else head[1]["rows/index"])


def _last_round(parts: Files, name: str, before: int | None) -> int:
    """The newest of the rounds that were sent, which are those after the last one here, none left out."""
    rounds = []
    for file, content in parts.items():
        stem, _, ending = file.removeprefix("parts/").partition(".")
        if not (stem.isdecimal() and is_whole(int(stem)) and ending in ("json", "safetensors")):
            raise RunError(f"a worker sent {name}/{in_print(file)[:100]}, which is no file of a round")
        if ending == "json":
            if broken := broken_part(_json(content, f"{name}/{file}"), int(stem)):
                raise RunError(f"a worker sent {name}/{file} with a damaged '{broken}'")
            rounds.append(int(stem))
    first = 0 if before is None else before + 1
    if sorted(rounds) != list(range(first, first + len(rounds))) or not rounds:
        raise RunError(f"{name}: a worker sent rounds {sorted(rounds)}, but {first} is the next")
    return max(rounds)


def _json(content: bytes, name: str) -> dict[str, Any]:
    try:
        found = parse_json(content)
    except ValueError as error:
        raise RunError(f"a worker sent {name}, which cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise RunError(f"a worker sent {name}, which does not hold a JSON object")
    return found


def _tensors(content: bytes, name: str) -> State:
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise RunError(f"a worker sent {name}, which cannot be read: {in_print(str(error))[:200]}") from None
