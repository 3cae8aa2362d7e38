"""The record of a map: benchmarks/records/defences.json says how it was made, defences.csv what was found, a
line for each defence under each attack on each dataset."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import holdfast
from benchmarks.defence_map.axes import Attacked, Defence
from benchmarks.defence_map.scales import ROOT, Scale

RECORDS = Path(__file__).resolve().parents[1] / "records"
COLUMNS = ("data", "defence", "attack", "accuracy", "asr", "dacc", "fpr", "fnr", "auc", "ms", "note")
_DIGITS = {"accuracy": 1, "asr": 1, "dacc": 1, "fpr": 1, "fnr": 1, "auc": 2, "ms": 2}


@dataclass(frozen=True)
class Found:
    """One defence under one attack. Figures are in per cent; accuracy and ASR have one number for each seed,
    the others are means over them, `ms` the median."""

    accuracy: tuple[float, ...] = ()
    asr: tuple[float, ...] = ()
    dacc: float | None = None
    fpr: float | None = None
    fnr: float | None = None
    auc: float | None = None
    ms: float | None = None
    note: str = ""

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.accuracy) if self.accuracy else None

    @property
    def fooled(self) -> float | None:
        return statistics.fmean(self.asr) if self.asr else None


@dataclass(frozen=True)
class Record:
    """A whole map."""

    head: Mapping[str, Any]
    cells: Mapping[tuple[str, str, str], Found] = field(default_factory=dict)
    """By dataset, defence and attack."""

    @property
    def data(self) -> list[str]:
        return list(self.head["data"])

    @property
    def defences(self) -> Mapping[str, Mapping[str, Any]]:
        return self.head["defences"]

    @property
    def attacks(self) -> Mapping[str, Mapping[str, Any]]:
        return self.head["attacks"]

    def at(self, data: str, defence: str, attack: str) -> Found:
        return self.cells.get((data, defence, attack), Found())


def head_of(
    command: str,
    name: str,
    scale: Scale,
    defences: Sequence[Defence],
    attacks: Sequence[Attacked],
    date: str,
    device: str,
    seconds: Mapping[str, float],
    processes: int,
) -> dict[str, Any]:
    """What a reader has to know of a map."""
    return {
        "command": command,
        "date": date,
        "device": device,
        "processes": processes,
        "versions": f"Holdfast {holdfast.__version__}, PyTorch {torch.__version__}, Python"
        f" {platform.python_version()}",
        "scale": name,
        "seeds": list(range(scale.seeds)),
        "train": dict(scale.train),
        "root": ROOT,
        "data": {data: {**scale.data[data], "seconds": round(seconds.get(data, 0.0))} for data in scale.data},
        "defences": {
            one.name: {"kind": one.kind, "part": one.part, **one.table, "paper": one.paper}
            for one in defences
        },
        "attacks": {
            one.name: {"group": one.group, "knows": one.knows, **one.table, "paper": one.paper}
            for one in attacks
        },
    }


def this_machine(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} cores of a {platform.machine()} machine"


def joined(rows: Iterable[Mapping[str, Any]]) -> Found:
    """The seeds of one defence under one attack as one line."""
    rows = sorted(rows, key=lambda row: row["seed"])
    notes = list(dict.fromkeys(str(row["note"]) for row in rows if row.get("note")))
    fallen = sum(row.get("fallback_rounds") or 0 for row in rows)
    if fallen:
        notes.append(f"rounds in which it fell back to the median: {fallen}")

    def each(name: str) -> list[float]:
        return [
            float(row[name]) for row in rows if row.get(name) is not None and math.isfinite(float(row[name]))
        ]

    def mean(name: str) -> float | None:
        return statistics.fmean(values) if (values := each(name)) else None

    return Found(
        tuple(each("accuracy")),
        tuple(each("asr")),
        **{name: mean(name) for name in ("dacc", "fpr", "fnr", "auc")},
        ms=statistics.median(each("ms")) if each("ms") else None,
        note="; ".join(notes),
    )


def as_csv(cells: Mapping[tuple[str, str, str], Found]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for (data, defence, attack), found in cells.items():
        writer.writerow(
            [data, defence, attack, *(_written(getattr(found, name), name) for name in COLUMNS[3:])]
        )
    return out.getvalue()


def _written(value: Any, name: str) -> str:
    if value is None or name == "note":
        return str(value or "")
    several = value if isinstance(value, tuple) else (value,)
    return " ".join(f"{one:.{_DIGITS[name]}f}" for one in several)


def write(record: Record, folder: Path = RECORDS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "defences.json").write_text(json.dumps(record.head, indent=1) + "\n")
    (folder / "defences.csv").write_text(as_csv(record.cells))


def read(folder: Path = RECORDS) -> Record:
    head = json.loads((folder / "defences.json").read_text())
    with open(folder / "defences.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return Record(head, {(row["data"], row["defence"], row["attack"]): _found(row) for row in rows})


def _found(row: Mapping[str, str]) -> Found:
    several = {name: tuple(map(float, row[name].split())) for name in ("accuracy", "asr")}
    single = {name: float(row[name]) if row[name] else None for name in ("dacc", "fpr", "fnr", "auc", "ms")}
    return Found(**several, **single, note=row["note"])  # type: ignore[arg-type]
