"""What a worker sends back of the cells that it trains in a folder of its own: committed rounds at least
every so many seconds, and a cell when it ends.

Rounds are collected in the thread that trains, between two exchanges and after the commit that is on its way,
so that all cells of a stack are sent at the same round and nothing changes while it is read. Private rows
that did not change since the last time are left out."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from holdfast.core.types import State
from holdfast.experiment.loop import Experiment
from holdfast.experiment.runner import RunCallbacks, Say
from holdfast.storage.client_state import RowStore, bytes_of
from holdfast.storage.store import Store
from holdfast.sweeps.parcels import Files

STATE, ROWS = "state.safetensors", "rows.safetensors"
"""Names under which a cell's committed state and its changed private rows travel."""
_ENDS = ("manifest.json", "start.safetensors", "result.json", "failure.json", "traceback.txt")
"""Files of a cell that are written when it begins or ends."""
_AT_ONCE = 256  # private rows that are read at a time


class Sender:
    """Sends what is new of some cells in `folder`; `send` gets the files of all of them at once."""

    def __init__(
        self,
        folder: Path,
        cells: Iterable[str],
        send: Callable[[Files], None],
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.folder, self.interval, self._send, self._clock = folder, interval, send, clock
        self._cells = {name: _Sent(folder / name) for name in cells}
        self._experiments: dict[str, Experiment] = {}
        self._groups = {path.name for path in (folder / "groups").glob("*.json")}
        self._last = clock()

    def watch(self, say: Say) -> RunCallbacks:
        return RunCallbacks(say=say, moved=self.moved, planned=self.planned)

    def planned(self, experiments: list[Experiment]) -> None:
        """The cells begin: send on which terms."""
        self._experiments |= {experiment.out.name: experiment for experiment in experiments}
        self.send(self._cells)

    def moved(self, experiment: Experiment) -> None:
        if self._clock() - self._last >= self.interval:
            self.send(self._cells)
        elif experiment.finished is not None and not self._cells[experiment.out.name].ended:
            # others of the stack have ended with it
            self.send([name for name, one in self._experiments.items() if one.finished is not None])

    def send(self, names: Iterable[str]) -> None:
        """Send what is new of these cells."""
        stores = [one.store for one in self._experiments.values()]
        wait([store.on_its_way for store in stores if store.on_its_way is not None])
        files: Files = {}
        for path in sorted((self.folder / "groups").glob("*.json")):
            if path.name not in self._groups:
                self._groups.add(path.name)
                files[f"groups/{path.name}"] = path.read_bytes()
        for name in names:
            files |= {f"{name}/{file}": content for file, content in self._cells[name].news().items()}
        if files:
            self._send(files)
        self._last = self._clock()


class _Sent:
    """What the other side has of one cell."""

    def __init__(self, path: Path):
        self.path = path
        self.files = {name: (path / name).read_bytes() for name in _ENDS if (path / name).exists()}
        self.round, self.ended = -1, False
        self.rows: dict[int, bytes] = {}
        """A digest of each client's private row."""
        head = Store(path).head()
        if head is not None:
            self.round, state = head
            self._changed(state)

    def news(self) -> Files:
        """The files that are new since the last time."""
        found: Files = {}
        for name in _ENDS:
            file = self.path / name
            content = file.read_bytes() if file.exists() else b""
            if content and self.files.get(name) != content:
                self.files[name] = found[name] = content
        self.ended = self.ended or "result.json" in found or "failure.json" in found
        store = Store(self.path)
        head = store.head()
        if head is not None and head[0] > self.round:
            round, state = head
            for file in sorted((self.path / "parts").glob("[0-9]*.*")):
                if file.stem.isdecimal() and self.round < int(file.stem) <= round:
                    found[f"parts/{file.name}"] = file.read_bytes()
            if changed := self._changed(state):
                found[ROWS] = save(changed)
            found[STATE] = (self.path / store.state_file(round)).read_bytes()
            self.round = round
        return found

    def _changed(self, state: State) -> State:
        """The private rows that are not as they were, with the ids of their clients."""
        rows = RowStore(self.path / "rows", state["rows/index"])
        clients = sorted(rows.place, key=rows.place.__getitem__)
        ids, parts = list[int](), list[State]()
        for start in range(0, len(clients), _AT_ONCE):
            some = torch.tensor(clients[start : start + _AT_ONCE], dtype=torch.int64)
            values = rows.read(some)
            new = self._note(some, values)
            ids += some[new].tolist()
            parts.append({name: value[new] for name, value in values.items()})
        if not ids:
            return {}
        joined = {f"row/{name}": torch.cat([part[name] for part in parts]) for name in parts[0]}
        return {"ids": torch.tensor(ids, dtype=torch.int64), **joined}

    def _note(self, ids: Tensor, values: State) -> Tensor:
        """Remember these rows; bool[n]: which of them are new or changed."""
        raw = bytes_of(values)
        new = []
        for place, client in enumerate(ids.tolist()):
            sha = hashlib.blake2b(digest_size=16)
            for name in sorted(raw):
                sha.update(raw[name][place].data)
            new.append(self.rows.get(client) != sha.digest())
            self.rows[client] = sha.digest()
        return torch.tensor(new, dtype=torch.bool)
