"""Read finished or unfinished runs from disk into what tables and pages show. Runs that differ by their seed
only form one line."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.evaluation.scores import METRICS
from holdfast.experiment.manifest import no_run, run_folders
from holdfast.results.run import Run, name_of
from holdfast.storage.status import run_status
from holdfast.sweeps.folder import listed

Points = list[tuple[int, float]]  # round, value


@dataclass(frozen=True)
class Dot:
    """One client's accuracy with the model the method deploys, after the last evaluated round."""

    client: int
    seed: int
    accuracy: float
    samples: int
    malicious: bool = False
    """Means leave it out."""
    name: str = ""
    """Where clients have names."""


class RunRecord:
    """One run as the report reads it."""

    def __init__(self, path: Path):
        self.run = Run(path)
        self.path, self.manifest = path, self.run.manifest
        self.config: dict[str, Any] = self.manifest["config"]
        self.seed = int(self.config["seed"])
        self.round, self.rounds = self.run.round, int(self.config["train"]["rounds"])
        self.parts = self.run.store.parts(self.round)
        self.run_status = run_status(path, self.manifest["label"])
        self.result = self.run_status.result
        self.method = name_of(self.config["method"]) or "?"
        self.label = self.manifest["label"] if self.manifest.get("sweep") else self._described()
        self.twin: RunRecord | None = None
        """The same run without an attack, where it is shown too."""

    def _described(self) -> str:
        """The name of a single run: its method, aggregator, server optimiser and attack."""
        others = (name_of(self.config.get(kind)) for kind in ("aggregator", "server", "attack"))
        return " ".join(filter(None, (self.method, *others)))

    @property
    def finished(self) -> bool:
        return self.result is not None

    @cached_property
    def final(self) -> dict[str, Any]:
        """The final figures; of an unfinished run, those of its last evaluation. A failed run has none."""
        if self.result is not None:
            return self.result["final"] | (
                {} if self.twin is None else {"attack/lost": self._lost(self.twin)}
            )
        if self.run_status.status == "failed":
            return {}
        evaluated = [p["metrics"] for p in self.parts if p["metrics"].get("accuracy") is not None]
        if not evaluated:
            return {}
        figures = {**evaluated[-1], "accuracy/best": max(m["accuracy"] for m in evaluated)}
        for name in ("bytes/up", "bytes/down"):
            figures[name] = sum(p["metrics"].get(name) or 0 for p in self.parts)
        for name in ("client", "server", "evaluate"):
            figures[f"seconds/{name}"] = sum(p.get("seconds", {}).get(name, 0.0) for p in self.parts)
        return figures

    def _lost(self, twin: RunRecord) -> float | None:
        """Accuracy that the attack took from the clients that are benign here and measured in both runs. The
        mean of the run without the attack is over other clients, because none of them is malicious there."""
        if not twin.finished:
            return None
        malicious = set(self.run.malicious())
        here, there = ({dot.client: dot.accuracy for dot in record.dots()} for record in (self, twin))
        both = [
            there[client] - here[client] for client in here if client in there and client not in malicious
        ]
        return statistics.fmean(both) if both else None

    @cached_property
    def protocol(self) -> dict[str, Any]:
        if self.result is not None:
            return self.result["protocol"]
        try:
            method = self.run.parts_config.parts().method
            return {**self.config["evaluate"], "models": list(method.models), "deployed": method.deploys}
        except HoldfastError:  # objects that the manifest cannot name
            return {**self.config["evaluate"], "deployed": None}

    @property
    def bans(self) -> bool:
        """Whether any client was ever banned."""
        return any(part.get("banned") for part in self.parts)

    def curve(self, metric: str) -> Points:
        return [
            (p["round"], p["metrics"][metric]) for p in self.parts if p["metrics"].get(metric) is not None
        ]

    def dots(self) -> list[Dot]:
        deployed = f"accuracy/{self.protocol.get('deployed')}"
        for part in reversed(self.parts):
            if part["metrics"].get("accuracy") is not None:
                frame = self.run.clients(part["round"])
                if deployed not in frame:
                    return []
                bad, names = set(self.run.malicious(part["round"])), self.run.client_names
                rows = zip(frame["client"], frame[deployed], frame["samples"], strict=True)
                return [
                    Dot(
                        int(c),
                        self.seed,
                        float(a),
                        int(n),
                        int(c) in bad,
                        self.run.client_name(int(c)) if names else "",
                    )
                    for c, a, n in rows
                    if n > 0 and math.isfinite(a)
                ]
        return []


@dataclass(frozen=True)
class SettingRuns:
    """Runs of one setting under one or several seeds: a line of the table and of the charts."""

    label: str
    records: tuple[RunRecord, ...]

    @property
    def seeds(self) -> int:
        return len(self.records)

    @property
    def status(self) -> str:
        """The status of its runs, in words."""
        if len(self.records) == 1:
            return self.records[0].run_status.words
        said = [record.run_status.status for record in self.records]
        return ", ".join(f"{said.count(status)} {status}" for status in dict.fromkeys(said))

    def values(self, metric: str) -> list[float]:
        return [float(c.final[metric]) for c in self.records if c.final.get(metric) is not None]

    def mean(self, metric: str) -> float | None:
        """Of the seeds that have the figure."""
        values = self.values(metric)
        return statistics.fmean(values) if values else None

    def spread(self, metric: str) -> float | None:
        """Standard deviation over seeds; none for a single seed."""
        values = self.values(metric)
        return statistics.stdev(values) if len(values) > 1 else None

    def curve(self, metric: str) -> list[tuple[int, float, float, float]]:
        """(round, mean, lowest, highest) over the seeds, for rounds that all of them have."""
        curves = [dict(c.curve(metric)) for c in self.records]
        rounds = sorted(set.intersection(*(set(c) for c in curves))) if curves else []
        return [
            (r, statistics.fmean(c[r] for c in curves), min(c[r] for c in curves), max(c[r] for c in curves))
            for r in rounds
        ]

    def dots(self) -> list[Dot]:
        return [dot for record in self.records for dot in record.dots()]


def asked(lines: Iterable[SettingRuns]) -> list[str]:
    """The metrics beside accuracy and loss that any of the runs was asked for."""
    wanted = {
        metric
        for line in lines
        for record in line.records
        for metric in record.config["evaluate"].get("metrics", ())
    }
    return [metric for metric in METRICS if metric in wanted]


def read_records(folder: Path) -> list[RunRecord]:
    """The runs in a folder: itself, or those directly below it."""
    return read_all([folder])


def read_all(folders: Sequence[Path]) -> list[RunRecord]:
    """The runs of several folders, each run once; one that is attacked here may have its honest twin
    there."""
    paths: dict[Path, Path] = {}
    for folder in folders:
        found = run_folders(Path(folder))
        if not found:
            raise ConfigError(no_run(folder))
        for path in found:
            paths.setdefault(path.resolve() if len(folders) > 1 else path, path)
    records = [RunRecord(path) for path in paths.values()]
    honest: dict[str, RunRecord] = {}
    for record in records:
        if record.config["attack"] is None:
            same = _but_for_the_attack(record)
            honest[same] = _finished_of(honest.get(same), record)
    for record in records:
        if record.config["attack"] is not None:
            record.twin = honest.get(_but_for_the_attack(record))
    return records


def _finished_of(known: RunRecord | None, other: RunRecord) -> RunRecord:
    """Of two runs of one experiment the finished one, else the first."""
    return other if known is None or (other.finished and not known.finished) else known


def _but_for_the_attack(record: RunRecord) -> str:
    return json.dumps({**record.config, "attack": None}, sort_keys=True)


def not_begun(records: Sequence[RunRecord]) -> int:
    """How many cells of the sweep that these runs belong to have left nothing to show: not begun, or failed
    before their first round."""
    folder = records[0].path.parent
    return len([c for c in listed(folder) if not (folder / c["folder"] / "manifest.json").exists()])


def one_each(records: Iterable[RunRecord]) -> list[SettingRuns]:
    """Make a line of every run."""
    return _told_apart([SettingRuns(record.label, (record,)) for record in records])


def by_setting(records: Iterable[RunRecord]) -> list[SettingRuns]:
    """Group runs that differ only by their seed, in the order of their first run. A grid may hold one
    experiment several times (no attack, with any fraction): it counts once, because counted as further seeds
    it would make the spread too small."""
    return _told_apart(settings(records))


def settings(records: Iterable[RunRecord]) -> list[SettingRuns]:
    """The same, but two lines may have the same name."""
    groups: dict[str, dict[int, RunRecord]] = {}
    for record in records:
        same = json.dumps({**record.config, "seed": None}, sort_keys=True)
        by_seed = groups.setdefault(same, {})
        by_seed[record.seed] = _finished_of(by_seed.get(record.seed), record)
    found = [tuple(by_seed.values()) for by_seed in groups.values()]
    return [
        SettingRuns(_without_seed(records[0]) if len(records) > 1 else records[0].label, records)
        for records in found
    ]


def _without_seed(record: RunRecord) -> str:
    return re.sub(r"(^| )seed=\S+", "", record.label).strip() or record.method


def _told_apart(lines: list[SettingRuns]) -> list[SettingRuns]:
    """Add the folder of the first run to names that occur twice."""
    names = [line.label for line in lines]
    return [
        SettingRuns(f"{x.label} ({x.records[0].path.name})", x.records) if names.count(x.label) > 1 else x
        for x in lines
    ]
