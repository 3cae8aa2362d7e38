"""Follow a job in the browser: a small server on this machine that shows only what is committed on disk.

It answers `/`, the report as of now, where there are many runs `/runs/NAME.html` with the page of each, and
`/state` before either, by which the page learns that there is something new. Names are looked up among the
runs that there are, never on the disk. page_server.py answers the requests, on the loopback address only."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.experiment.manifest import read_manifest, run_folders
from holdfast.report.markup import script_json, whole_page
from holdfast.report.page import MOST_TOGETHER, render, render_one
from holdfast.report.page_server import PageServer
from holdfast.report.read_runs import read_records
from holdfast.storage.status import FAILURE, run_status
from holdfast.sweeps.folder import listed

_FRESH = 1.0  # seconds for which a look at the disk is good enough
_REST = 4  # a page is rendered again after as many times what it took


@dataclass(frozen=True)
class State:
    """The progress of a job: `version` changes whenever there is more to show."""

    version: str
    cells: int
    done: int
    failed: int
    round: int
    rounds: int
    committed: float | None
    """When anything was committed last, in seconds since the epoch."""

    @property
    def waiting(self) -> bool:
        """Nothing to draw yet."""
        return self.round == 0 and not self.done

    @property
    def finished(self) -> bool:
        return 0 < self.cells == self.done

    @property
    def words(self) -> str:
        if self.finished:
            return "finished" + (f", {self.failed} of {self.cells} failed" if self.failed else "")
        if not self.cells:
            return "waiting for a run to begin"
        if self.waiting:
            return "waiting for the first round"
        runs = f", {self.done} of {self.cells} runs done" if self.cells > 1 else ""
        return f"{self.round} of {self.rounds} rounds{runs}"

    def plain(self) -> dict[str, Any]:
        age = None if self.committed is None or self.finished else max(0, round(time.time() - self.committed))
        return {"version": self.version, "words": self.words, "finished": self.finished, "age": age}


@dataclass(frozen=True)
class _Seen:
    """What was seen of one run."""

    status: str
    done: bool
    round: int
    rounds: int
    committed: float | None


class Lookout:
    """Reads the progress of a folder, and only the files that have changed, so a job is not slowed down."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self._seen: dict[Path, tuple[tuple[int | None, ...], _Seen]] = {}

    def look(self) -> State:
        """Read the small files that name what is committed; no tensors are read."""
        runs = {path: self._run(path) for path in run_folders(self.folder)}
        unbegun = [path for cell in listed(self.folder) if (path := self.folder / cell["folder"]) not in runs]
        lost = sum((path / FAILURE).exists() for path in unbegun)
        told = [[path.name, run.status, run.round] for path, run in runs.items()]
        return State(
            version=hashlib.sha256(json.dumps([told, len(unbegun), lost]).encode()).hexdigest()[:16],
            cells=len(runs) + len(unbegun),
            done=sum(run.done for run in runs.values()) + lost,
            failed=sum(run.status == "failed" for run in runs.values()) + lost,
            round=sum(run.round for run in runs.values()),
            rounds=sum(run.rounds for run in runs.values()),
            committed=max(
                (run.committed for run in runs.values() if run.committed is not None), default=None
            ),
        )

    def _run(self, path: Path) -> _Seen:
        now = tuple(_written(path / name) for name in ("manifest.json", "head.json", "result.json", FAILURE))
        if path not in self._seen or self._seen[path][0] != now:
            status, rounds = run_status(path, ""), int(read_manifest(path)["config"]["train"]["rounds"])
            done = rounds if status.result is not None else min(status.round, rounds)
            self._seen[path] = now, _Seen(status.status, status.done, done, rounds, now[1] and now[1] / 1e9)
        return self._seen[path][1]


def _written(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class _Page:
    version: str
    text: str
    next: float
    """Time before which it is not drawn again."""


class Viewed:
    """The pages of a folder, each rendered again only when something changed, and not more often than leaves
    the machine to the job; many threads may ask. A page is named by its path: `/` is about all runs."""

    def __init__(self, folder: Path):
        self.folder, self._lookout = Path(folder).resolve(), Lookout(folder)  # `.` has a name too
        self._lock = threading.Lock()
        self._looked = -math.inf
        self._state: State | None = None
        self._pages: dict[str, _Page] = {}

    def has(self, path: str) -> bool:
        return path == "/" or path in _paths(run_folders(self.folder))

    def state(self, path: str = "/") -> State:
        """With the version that `page` would give."""
        with self._lock:
            state, page = self._now(), self._pages.get(path)
            return state if page is None or self._due(page, state) else replace(state, version=page.version)

    def page(self, path: str = "/") -> str:
        with self._lock:
            state, page = self._now(), self._pages.get(path)
            if page is None or self._due(page, state):
                began = time.monotonic()
                text = self._drawn(state, path)
                page = self._pages[path] = _Page(
                    state.version, text, time.monotonic() + _REST * (time.monotonic() - began)
                )
            return page.text

    @staticmethod
    def _due(page: _Page, state: State) -> bool:
        return page.version != state.version and time.monotonic() >= page.next

    def _now(self) -> State:
        if self._state is None or time.monotonic() - self._looked >= _FRESH:
            self._state, self._looked = self._lookout.look(), time.monotonic()
        return self._state

    def _drawn(self, state: State, path: str) -> str:
        live = script_json(state.plain())
        if state.waiting:
            return _message(f"{self.folder.name}: {state.words}", self.folder.name, state.words, live)
        try:
            return self._report(path, live)
        # for example a run that is written only in part: the next round may complete it, so the page goes on
        except Exception as error:
            why = str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
            return _message(self.folder.name, self.folder.name, f"the page cannot be drawn now: {why}", live)

    def _report(self, path: str, live: Markup) -> str:
        cells = read_records(self.folder)
        paths = _paths([cell.path for cell in cells])
        if path == "/":
            return render(cells, links={run: quote(to) for to, run in paths.items()}, live=live)
        return render_one(cells, [cell.path for cell in cells].index(paths[path]), "/", live)


def _paths(runs: Sequence[Path]) -> dict[str, Path]:
    """Where the page of each run is, if it has one of its own."""
    return {f"/runs/{run.name}.html": run for run in runs} if len(runs) > MOST_TOGETHER else {}


def _message(title: str, heading: str, words: str, live: Markup) -> str:
    """A page that has nothing to show but a sentence."""
    return whole_page(
        "message.html", title=title, heading=heading, words=words[:1].upper() + words[1:], live=live
    )


class Server(PageServer):
    """Serves the pages of one folder, on the loopback address, until it is closed."""

    def __init__(self, folder: Path, port: int = 0, noted: Callable[[str], None] = lambda words: None):
        if not Path(folder).is_dir():
            raise ConfigError(
                f"there is no folder {folder}; start the job first, or name the folder that it writes to"
            )
        super().__init__(Viewed(folder), port, noted)
