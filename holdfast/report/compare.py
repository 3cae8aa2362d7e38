"""Runs side by side: a line per setting, what differs between them, and whether differences are significant.

Only finished runs are compared and tested: the last figure of an unfinished run belongs to another round."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, suggest
from holdfast.report.config_differences import differing
from holdfast.report.paired_tests import LEAST, Paired, holm, paired, smallest
from holdfast.report.read_runs import RunRecord, SettingRuns, read_all, settings

LEVEL = 0.05  # a p below which a difference is called one
MOST_PAIRS = 45  # all pairs of ten lines; of more lines, each is compared with the first only


@dataclass(frozen=True)
class Pair:
    """Two lines, the second less the first, as the label says: over the seeds they share, and over the
    clients of one of these seeds."""

    first: SettingRuns
    second: SettingRuns
    over_seeds: Paired | None
    """None where they share no seed."""
    seeds: tuple[int, ...]
    over_clients: Paired | None = None
    """None where no seed has the same clients in both."""
    seed: int | None = None
    """Whose clients these are."""
    better: int = 0
    worse: int = 0
    """Clients that the second line serves better, and worse."""

    @property
    def label(self) -> str:
        return f"{self.second.label} − {self.first.label}"


@dataclass(frozen=True)
class Corrected:
    """Holm's correction of the p values of all pairs, each test by itself."""

    t: list[float | None]
    wilcoxon: list[float | None]
    clients: list[float | None]


class Comparison:
    def __init__(self, lines: Sequence[SettingRuns], metric: str = "accuracy", against: str | None = None):
        self.lines, self.metric = list(lines), metric
        _check_metric(metric, self.lines)
        self.reference = self.lines[0] if against is None else _named(against, self.lines)
        every = list(itertools.combinations(self.lines, 2))
        self.all_pairs = against is None and len(every) <= MOST_PAIRS
        chosen = (
            every
            if self.all_pairs
            else [(self.reference, line) for line in self.lines if line is not self.reference]
        )
        self.pairs = [_pair(first, second, metric) for first, second in chosen]
        seeds, clients = [pair.over_seeds for pair in self.pairs], [pair.over_clients for pair in self.pairs]
        self.corrected = Corrected(
            holm([None if test is None else test.t for test in seeds]),
            holm([None if test is None else test.wilcoxon for test in seeds]),
            holm([None if test is None else test.wilcoxon for test in clients]),
        )

    @cached_property
    def differs(self) -> dict[str, list[Any]]:
        """Keys of the configs that are not the same for all lines, with each line's value."""
        return differing([{**line.records[0].config, "seed": None} for line in self.lines])

    def difference(self, line: SettingRuns) -> float | None:
        """Of the means, to the line that all are compared with."""
        here, there = (mean_of(by_seed(x, self.metric)) for x in (line, self.reference))
        return None if here is None or there is None or line is self.reference else here - there

    @property
    def notes(self) -> list[str]:
        """What limits the comparison, and what a test would need."""
        out = []
        unfinished = [record for line in self.lines for record in line.records if not record.finished]
        if unfinished:
            out.append(
                f"{_runs(len(unfinished))} not finished and left out of differences and tests:"
                f" {_told(unfinished)}."
            )
        without = [
            line.label
            for line in self.lines
            if not by_seed(line, self.metric) and any(record.finished for record in line.records)
        ]
        if without:
            out.append(f"No run of {', '.join(without)} has a value of {self.metric}.")
        return out + self._about_seeds()

    def _about_seeds(self) -> list[str]:
        if not self.pairs:
            return ["There is only one setting, so nothing can be compared."]
        out = []
        few = [pair for pair in self.pairs if len(pair.seeds) < LEAST]
        if few:
            which = "any pair" if len(few) == len(self.pairs) else f"{len(few)} of {len(self.pairs)} pairs"
            out.append(
                f"No test over seeds is possible for {which}: a pair must share at least {LEAST} finished"
                f" seeds, and '{few[0].label}' shares {len(few[0].seeds)}. Run the settings under the same"
                " seeds, for example seed = [0, 1, 2, 3, 4, 5] under [sweep]."
            )
        tested = [len(pair.seeds) for pair in self.pairs if len(pair.seeds) >= LEAST]
        if tested and smallest(min(tested)) >= 0.05:
            out.append(
                f"With {min(tested)} seeds the signed-rank test cannot give less than"
                f" {smallest(min(tested)):.3g}, however large the difference; from 6 seeds on it can fall"
                " below 0.05."
            )
        out += self._verdict()
        strangers = [pair for pair in self.pairs if not all(_same_data(*twins) for twins in _twins(pair))]
        if strangers:
            out.append(
                f"'{strangers[0].label}': a seed gives the two settings different partitions, so paired tests"
                " say little and clients cannot be compared."
            )
        return out

    def _verdict(self) -> list[str]:
        """The t-tests in words."""
        tested = [(pair, p) for pair, p in zip(self.pairs, self.corrected.t, strict=True) if p is not None]
        if not tested:
            return []
        sure = [f"{pair.label} (p = {p:.2g})" for pair, p in tested if p < LEVEL]
        if not sure:
            return [
                f"By the t-test after Holm's correction, none of {len(tested)} differences is significant"
                f" (p < {LEVEL}). This does not prove that the settings are equal; more seeds may"
                " separate them."
            ]
        return [
            f"By the t-test after Holm's correction, {len(sure)} of {len(tested)} differences are"
            f" significant (p < {LEVEL}): {', '.join(sure)}."
        ]

    def plain(self) -> dict[str, Any]:
        """As --json prints it."""
        return {
            "metric": self.metric,
            "against": self.reference.label,
            "lines": [self._plain_line(line) for line in self.lines],
            "differs": {
                key: dict(zip((line.label for line in self.lines), values, strict=True))
                for key, values in self.differs.items()
            },
            "pairs": [self._plain_pair(place, pair) for place, pair in enumerate(self.pairs)],
            "notes": self.notes,
        }

    def _plain_line(self, line: SettingRuns) -> dict[str, Any]:
        values = by_seed(line, self.metric)
        return {
            "label": line.label,
            "runs": [str(record.path) for record in line.records],
            "status": line.status,
            "values": {str(seed): value for seed, value in values.items()},
            "mean": mean_of(values),
            "std": spread_of(values),
            "difference": self.difference(line),
        }

    def _plain_pair(self, place: int, pair: Pair) -> dict[str, Any]:
        seeds, clients = pair.over_seeds, pair.over_clients
        return {
            "label": pair.label,
            "setting": pair.second.label,
            "against": pair.first.label,
            "seeds": list(pair.seeds),
            "difference": seeds and seeds.mean,
            "low": seeds and seeds.low,
            "high": seeds and seeds.high,
            "t": {"p": seeds and seeds.t, "holm": self.corrected.t[place]},
            "wilcoxon": {"p": seeds and seeds.wilcoxon, "holm": self.corrected.wilcoxon[place]},
            "clients": (
                None
                if clients is None
                else {
                    "seed": pair.seed,
                    "clients": clients.pairs,
                    "difference": clients.mean,
                    "better": pair.better,
                    "worse": pair.worse,
                    "wilcoxon": {"p": clients.wilcoxon, "holm": self.corrected.clients[place]},
                }
            ),
        }


def read_lines(folders: Sequence[Path]) -> list[SettingRuns]:
    """A line per setting over all folders, with the seeds of all of them. Where two folders hold the same
    experiment, the folders are compared, and each keeps its own lines."""
    records = read_all(folders)
    homes = {record.path: _home(record, folders) for record in records}
    seen = {(homes[record.path], json.dumps(record.config, sort_keys=True)) for record in records}
    if len(seen) == len({experiment for _, experiment in seen}):
        return _told_apart(settings(records), homes)
    apart = [
        [record for record in records if homes[record.path] == home] for home in dict.fromkeys(homes.values())
    ]
    return _told_apart([line for some in apart for line in settings(some)], homes)


def _home(record: RunRecord, folders: Sequence[Path]) -> Path:
    """The folder through which the run was requested."""
    path = record.path.resolve()
    return next(
        folder for folder in (Path(f).resolve() for f in folders) if folder in (path, *path.parents[:2])
    )


def _told_apart(lines: list[SettingRuns], homes: dict[Path, Path]) -> list[SettingRuns]:
    """Give every line a name of its own: add the requested folder, or the run's own folder, or a number."""
    for place_of in (lambda line: homes[line.records[0].path].name, lambda line: line.records[0].path.name):
        names = [line.label for line in lines]
        known = {name: {place_of(line) for line in lines if line.label == name} for name in names}
        lines = [
            SettingRuns(f"{x.label} ({place_of(x)})", x.records) if len(known[x.label]) > 1 else x
            for x in lines
        ]
    met: dict[str, int] = {}
    out = []
    for line in lines:
        met[line.label] = met.get(line.label, 0) + 1
        out.append(
            line if met[line.label] == 1 else SettingRuns(f"{line.label} #{met[line.label]}", line.records)
        )
    return out


def by_seed(line: SettingRuns, metric: str) -> dict[int, float]:
    """The values of finished runs."""
    return {
        record.seed: float(record.final[metric])
        for record in line.records
        if record.finished and record.final.get(metric) is not None
    }


def mean_of(values: dict[int, float]) -> float | None:
    return statistics.fmean(values.values()) if values else None


def spread_of(values: dict[int, float]) -> float | None:
    return statistics.stdev(values.values()) if len(values) > 1 else None


def _check_metric(metric: str, lines: Sequence[SettingRuns]) -> None:
    final = [record.final for line in lines for record in line.records]
    known = {name for figures in final for name, value in figures.items() if isinstance(value, (int, float))}
    known -= {"diverged"}  # a round: its mean says nothing
    if metric in known:
        return
    if not known:
        raise ConfigError("none of these runs has been evaluated yet")
    if any(metric in figures for figures in final):
        raise ConfigError(f"metric: none of these runs has a value of '{metric}'")
    raise ConfigError(f"metric: unknown metric '{metric}'{suggest(metric, known)}")


def _named(label: str, lines: Sequence[SettingRuns]) -> SettingRuns:
    """The line that is meant: by its whole name, by its folder, by its method, or by some words of its
    name."""
    for means in (_is_called, _lies_in, _has_method, _has_words):
        found = [line for line in lines if means(line, label)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(f"'{line.label}'" for line in found)
            raise ConfigError(f"against: {len(found)} lines fit '{label}'; name one of them: {names}")
    raise ConfigError(f"against: no line is called '{label}'{suggest(label, [line.label for line in lines])}")


def _is_called(line: SettingRuns, label: str) -> bool:
    return line.label == label


def _lies_in(line: SettingRuns, label: str) -> bool:
    place = Path(label).resolve()
    return any(place in (record.path.resolve(), record.path.resolve().parent) for record in line.records)


def _has_method(line: SettingRuns, label: str) -> bool:
    return line.records[0].method == label


def _has_words(line: SettingRuns, label: str) -> bool:
    """Whether all words of the label, such as 'fedavg lie', are words of the line's name."""
    words = {word for said in line.label.split() for word in (said, said.rpartition("=")[2])}
    return bool(label.split()) and all(word in words for word in label.split())


def _pair(first: SettingRuns, second: SettingRuns, metric: str) -> Pair:
    here, there = by_seed(first, metric), by_seed(second, metric)
    shared = tuple(sorted(here.keys() & there.keys()))
    over_seeds = paired([there[seed] - here[seed] for seed in shared]) if shared else None
    for one, other in _twins(Pair(first, second, over_seeds, shared)):
        if _same_data(one, other):
            gains = _of_clients(one, other)
            if gains:
                better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
                return Pair(first, second, over_seeds, shared, paired(gains), one.seed, better, worse)
    return Pair(first, second, over_seeds, shared)


def _twins(pair: Pair) -> list[tuple[RunRecord, RunRecord]]:
    """The runs of both under each shared seed."""
    here, there = ({record.seed: record for record in line.records} for line in (pair.first, pair.second))
    return [(here[seed], there[seed]) for seed in pair.seeds]


def _same_data(one: RunRecord, other: RunRecord) -> bool:
    return bool(one.manifest["partition"] == other.manifest["partition"])


def _of_clients(one: RunRecord, other: RunRecord) -> list[float]:
    """The gain in accuracy of each client that is benign and measured in both runs."""
    malicious = {*one.run.malicious(), *other.run.malicious()}
    here, there = ({dot.client: dot.accuracy for dot in record.dots()} for record in (one, other))
    return [there[client] - here[client] for client in sorted(here.keys() & there.keys() - malicious)]


def _runs(count: int) -> str:
    return "1 run is" if count == 1 else f"{count} runs are"


def _told(records: Sequence[RunRecord], most: int = 4) -> str:
    said = [f"{record.path.name} ({record.run_status.words})" for record in records[:most]]
    return ", ".join(said) + (f" and {len(records) - most} more" if len(records) > most else "")
