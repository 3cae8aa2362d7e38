"""What a round of a large federation costs: 100,000 registered clients, 1,000 of them in the cohort, on 1, 8
and 64 GPUs. The tables are computed from measured parts by a formula (`costs`); nothing in them is a
measurement of the whole:

    python benchmarks/scale.py                                      # the tables of docs/scale.md
    python benchmarks/scale.py --docs                               # writes them into the page
    python benchmarks/scale.py --network-gbps 12.5 --disk-gbps 7    # for other links and disks
    python benchmarks/scale.py --measure cpu --columns 100000       # measures parts on this machine; a minute
    python benchmarks/scale.py --measure cuda                       # on a GPU; a minute

Parts are in benchmarks/records/scale.json, each with the command, the device, the date and the versions that
it comes from. A part that nobody has measured is missing there, and open in the tables."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REGISTERED, COHORT, STEPS = 100_000, 1_000, 100
GPUS, PER_MACHINE = (1, 8, 64), 8
ADAPTERS = 12 * 2 * 27 * 2 * 768
"""Layers, adapted matrices of each, rank, and width of both sides: `benchmarks/scale_parts.py`."""
PARTS_FILE = Path(__file__).resolve().parent / "records" / "scale.json"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
Seconds = float | None
"""None where a part that it needs is not measured."""


@dataclass(frozen=True)
class Model:
    """What clients train and send: `sent` numbers in each direction. `steps` has the seconds of one client's
    step on one GPU, by the number of clients in the stack."""

    name: str
    sent: int
    steps: Mapping[int, float]

    def step(self, clients: float) -> Seconds:
        """Return the step of the largest measured stack that is no larger; larger stacks are faster."""
        if not self.steps:
            return None
        return self.steps[max((size for size in self.steps if size <= clients), default=min(self.steps))]


@dataclass(frozen=True)
class Rules:
    """Measured seconds of the server's work on one column of 1,000 clients."""

    mean: float
    gram: float
    sort: float


@dataclass(frozen=True)
class Links:
    """Bytes per second: of each GPU's link, and of the disk of each machine."""

    network: float
    disk: float


def models(record: Mapping[str, Any]) -> list[Model]:
    named = (
        ("FedCAP's CIFAR-10 network", 156_810, ("cifar-48x20", "cifar-20")),
        ("ResNet18", 11_173_962, ("resnet18-10",)),
        ("LoRA of a transformer", ADAPTERS, ("adapters",)),
    )
    measured = record["cuda"]
    return [
        Model(name, sent, {measured[p]["stack"]: measured[p]["seconds"] for p in parts if p in measured})
        for name, sent, parts in named
    ]


def rules(parts: Mapping[str, Any]) -> Rules:
    """The seconds of one column, from parts that were measured on many."""
    each = {name: parts[name]["seconds"] / parts[name]["columns"] for name in ("mean", "gram", "sort")}
    if any(parts[name]["clients"] != COHORT for name in each):
        raise SystemExit(f"the parts must be measured with {COHORT} clients")
    return Rules(**each)


def costs(model: Model, gpus: int, rule: Rules, links: Links) -> dict[str, Seconds]:
    """The parts of a round in seconds; docs/scale.md has the formula. The cohort is cut evenly, the server's
    work by columns."""
    stack, apart, columns = 4 * COHORT * model.sent, (gpus - 1) / gpus, model.sent / gpus
    step = model.step(COHORT / gpus)
    train = None if step is None else COHORT * STEPS * step / gpus
    exchange = stack / gpus * apart / links.network
    model_to_all = 4 * model.sent * apart / links.network
    found: dict[str, Seconds] = {
        "train": train,
        "rows to columns": exchange,
        "weighted sum": rule.mean * columns,
        "Gram": rule.gram * columns + 8 * COHORT**2 * apart / links.network,
        "sort": rule.sort * columns,
        "model to all": model_to_all,
        "private rows": 2 * stack / machines(gpus) / links.disk,
    }
    for name, parts in {
        "mean": ("rows to columns", "weighted sum", "model to all"),
        "krum": ("rows to columns", "Gram", "model to all"),
        "median": ("rows to columns", "sort", "model to all"),
    }.items():
        found[f"server: {name}"] = sum(found[part] or 0.0 for part in parts)
    server = found["server: median"]
    whole = None if train is None or server is None else train + server
    found["round"] = whole
    rows = found["private rows"] or 0.0
    # one process writes them while the next round trains, several write them before it
    found["round, private rows"] = None if whole is None else max(whole, rows) if gpus == 1 else whole + rows
    return found


def sizes(model: Model, gpus: int) -> dict[str, float]:
    """Bytes. A GPU holds the rows of its clients and, while they are exchanged, its columns of all."""
    stack = 4.0 * COHORT * model.sent
    return {
        "each client, down and up": 8.0 * model.sent,
        "cohort, down and up": 2 * stack,
        "out of each GPU": stack / gpus * (gpus - 1) / gpus,
        "updates on a GPU": stack / gpus * (1 if gpus == 1 else 2),
        "private rows, all": 4.0 * REGISTERED * model.sent,
        "private rows, each machine": 4.0 * REGISTERED * model.sent / machines(gpus),
    }


def crossings(model: Model, rule: Rules, links: Links, gpus: int = PER_MACHINE) -> dict[str, Seconds]:
    """Where another term becomes as long as training, on one machine of eight GPUs."""
    found = costs(model, gpus, rule, links)
    train, median, step = found["train"], found["server: median"] or 0.0, model.step(float("inf"))
    if train is None or step is None:
        return dict.fromkeys(("steps", "cohort", "network", "disk"))
    stack = 4 * COHORT * model.sent
    return {
        "steps": STEPS * median / train,
        "cohort": COHORT * (COHORT * STEPS * step) / (rule.gram * model.sent),
        "network": stack / gpus * (gpus - 1) / gpus / train,
        "disk": 2 * stack / machines(gpus) / train,
    }


def machines(gpus: int) -> int:
    return max(1, gpus // PER_MACHINE)


# ---- the tables


def in_seconds(value: Seconds) -> str:
    if not value:
        return "open" if value is None else "0"
    if value >= 10:
        return f"{value:,.0f} s"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def in_bytes(value: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            return f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError


def in_numbers(value: float) -> str:
    return f"{value:,.2f}" if value < 10 else f"{float(f'{value:.2g}'):,.0f}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]], align: str = "---:") -> str:
    names = list(head)
    lines = [names, ["---", *[align] * (len(names) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_of_bytes(record: Mapping[str, Any]) -> str:
    rows = [
        [f"{model.name} ({model.sent:,})", str(gpus), *map(in_bytes, sizes(model, gpus).values())]
        for model in models(record)
        for gpus in GPUS
    ]
    return table(["model (numbers sent)", "GPUs", *sizes(models(record)[0], 1)], rows)


def table_of_seconds(record: Mapping[str, Any], links: Links) -> str:
    """A step that is not measured is written S: its training takes so many times S seconds."""
    rows, names = [], []
    for model in models(record):
        for gpus in GPUS:
            found = costs(model, gpus, rules(record["cuda"]), links)
            names = list(found)
            cells = {name: in_seconds(value) for name, value in found.items()}
            if not model.steps:
                cells["train"] = f"{COHORT * STEPS / gpus:,.6g} S"
                cells["round"] = f"{cells['train']} + {cells['server: median']}"
                cells["round, private rows"] = f"at least {cells['private rows']}"
            rows.append([model.name, str(gpus), *cells.values()])
    return table(["model", "GPUs", *names], rows)


def table_of_crossings(record: Mapping[str, Any], links: Links) -> str:
    rows = []
    for model in models(record):
        found = crossings(model, rules(record["cuda"]), links)
        cells = {
            "steps": in_numbers,
            "cohort": in_numbers,
            "network": lambda value: f"{in_bytes(value)}/s",
            "disk": lambda value: f"{in_bytes(value)}/s",
        }
        rows.append(
            [model.name, *("open" if found[n] is None else write(found[n]) for n, write in cells.items())]
        )
    head = (
        "model",
        "steps of a client at which `median` takes as long as training",
        "cohort at which the Gram product does",
        "link of a GPU below which rows to columns does",
        "disk of a machine below which private rows do",
    )
    return table(head, rows)


def table_of_cpu(record: Mapping[str, Any]) -> str:
    """The server's work on a machine without a GPU, from the parts of the CPU backend."""
    parts = record["cpu"]
    exchange = parts["rows to columns"]
    each = rules(parts)
    rows = []
    for model in models(record):
        found = (
            exchange["seconds"] / exchange["columns"] * model.sent,
            each.mean * model.sent,
            each.gram * model.sent,
            each.sort * model.sent,
        )
        rows.append([model.name, *map(in_seconds, found)])
    return table(("model", "rows to columns, 2 processes", "weighted sum", "Gram product", "sort"), rows)


def table_of_parts(record: Mapping[str, Any]) -> str:
    rows = []
    for device, parts in record.items():
        for name, part in parts.items():
            size = f", {part['clients']:,} x {part['columns']:,}" if "columns" in part else ""
            size += f", {part['stack']:,} clients" if "stack" in part else ""
            seconds = part["seconds"]
            took = f"{seconds * 1e6:,.2f} us" if seconds < 1e-3 else in_seconds(seconds)
            source = (part["device"], f"`{part['command']}`", part["date"], part["versions"])
            rows.append([f"`{device}`: {name}", part["what"] + size, took, *source])
    return table(("part", "what", "measured", "device", "command", "date", "versions"), rows, "---")


def tables(record: Mapping[str, Any], links: Links) -> dict[str, str]:
    return {
        "bytes": table_of_bytes(record),
        "seconds": table_of_seconds(record, links),
        "crossings": table_of_crossings(record, links),
        "cpu": table_of_cpu(record),
        "parts": table_of_parts(record),
    }


def updated(page: str, written: Mapping[str, str]) -> str:
    """The page with every table between its markers."""
    for name, text in written.items():
        begin, end = f"<!-- table of scale: {name} -->", "<!-- end of table -->"
        found = re.search(f"{re.escape(begin)}\n.*?{re.escape(end)}", page, re.S)
        if found is None:
            raise SystemExit(f"docs/scale.md has no line '{begin}' with '{end}' after it")
        page = page[: found.start()] + f"{begin}\n{text}\n{end}" + page[found.end() :]
    return page


def read(path: Path = PARTS_FILE) -> dict[str, Any]:
    return json.loads(path.read_text())


LINKS = Links(50e9, 2e9)
"""Assumed, not measured: 400 Gbit/s for each GPU, and a disk or a share of a file system."""


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--measure", choices=("cpu", "cuda"), help="measure the parts on this device")
    options.add_argument("--columns", type=int, default=1_000_000, help="columns of the stack of --measure")
    options.add_argument("--repeats", type=int, default=20, help="calls of which the fastest counts")
    options.add_argument("--parts", type=Path, default=PARTS_FILE, help="record of measured parts")
    options.add_argument("--network-gbps", type=float, default=LINKS.network / 1e9, help="GB/s, each GPU")
    options.add_argument("--disk-gbps", type=float, default=LINKS.disk / 1e9, help="GB/s, each machine")
    options.add_argument("--docs", action="store_true", help="write the tables into docs/scale.md")
    asked = options.parse_args()
    if asked.measure:
        import torch
        from scale_parts import measure

        record = read(asked.parts) if asked.parts.exists() else {}
        found = measure(torch.device(asked.measure), asked.columns, asked.repeats)
        record[asked.measure] = {**record.get(asked.measure, {}), **found}
        asked.parts.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(found, indent=1))
        return
    written = tables(read(asked.parts), Links(asked.network_gbps * 1e9, asked.disk_gbps * 1e9))
    if asked.docs:
        PAGE.write_text(updated(PAGE.read_text(), written))
        return
    print(f"{REGISTERED:,} registered clients, {COHORT:,} in the cohort, {STEPS} steps each")
    for name, text in written.items():
        print(f"\n{name}\n\n{text}")


if __name__ == "__main__":
    main()
