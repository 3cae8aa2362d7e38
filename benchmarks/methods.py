"""Measures every method, untuned, on digits and on UCI-HAR: accuracy without attack and under IPM and LIE,
seconds and bytes of a round.

    python benchmarks/methods.py --out runs/methods                    # digits; minutes on two cores
    python benchmarks/methods.py --data both --markdown                # also UCI-HAR, whose files
                                                                       docs/data.md says how to get
    python benchmarks/methods.py --only seconds --set engine.device=cuda

The runs of a dataset are one fused sweep, that of benchmarks/records. Runs that train together share their
time, so each method also runs alone for a few rounds, without attack: one method after the other, several
times. The median of a round's seconds counts, clients and server without evaluation. The first round of a run
loads and warms up, and does not count. The same command with the same --out continues after an
interruption."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console

import holdfast
from holdfast.api import SweepCell, fresh_folder
from holdfast.core.progress import progress
from holdfast.experiment.config_tables import assign, read_config
from holdfast.interactive.progress import Follow
from holdfast.report.table import Entry, Table, to_markdown, to_rich
from holdfast.sweeps.grid import copied

DATA = ("digits", "uci-har")
ATTACKS = ("none", "ipm", "lie")
TURNS, ROUNDS = 3, 4


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--data", choices=[*DATA, "both"], default="digits")
    options.add_argument("--out", type=Path, help="folder of the runs; default: a new one under runs/")
    options.add_argument("--only", choices=["accuracy", "seconds"], help="leave the other away")
    options.add_argument(
        "--methods", nargs="+", metavar="NAME", help="only these; local is always among them"
    )
    options.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    options.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="as for holdfast sweep"
    )
    asked = options.parse_args()
    out = asked.out or fresh_folder()
    for data in DATA if asked.data == "both" else (asked.data,):
        config = read_config(Path(__file__).parent / "records" / f"methods-{data}.toml", asked.set)
        if asked.methods:
            config["sweep"]["method.name"] = sorted({*asked.methods, "local"})
        cells = run_case(config, out / data / "sweep") if asked.only != "seconds" else {}
        seconds = measure(config, out / data / "alone") if asked.only != "accuracy" else {}
        found = table(config["sweep"]["method.name"], cells, seconds, config["train"]["rounds"])
        if asked.markdown:
            print(f"{data}\n\n{to_markdown(found)}")
        else:
            Console().print(to_rich(found))


def run_case(config: dict[str, Any], out: Path) -> dict[tuple[str, str], SweepCell]:
    """All methods under all attacks, together."""
    started = time.perf_counter()
    with Follow(Console(stderr=True)) as follow:
        cells = holdfast.sweep(config, out, watch=follow.watch())
        follow.say(f"{len(cells)} runs in {time.perf_counter() - started:.0f} s on {os.cpu_count()} cores")
    return {(name, attack): cell for cell in cells for name, attack in [cell.label.split(" ")]}


def measure(config: dict[str, Any], out: Path) -> dict[str, float]:
    """Return the seconds of a round of each method, run alone."""
    names, spent = config["sweep"]["method.name"], dict[str, list[float]]()
    with progress(f"seconds of a round, {TURNS} turns", TURNS * len(names)) as advance:
        for turn in range(TURNS):
            for name in names:
                spent.setdefault(name, []).extend(alone(config, name, out / f"{name}-{turn + 1}"))
                advance(1)
    return {name: statistics.median(values) for name, values in spent.items()}


def alone(config: dict[str, Any], name: str, out: Path) -> list[float]:
    """Seconds of the rounds of a short run, but for its first."""
    table = copied({section: given for section, given in config.items() if section != "sweep"})
    for path, value in {"method": {"name": name}, "train.rounds": ROUNDS, "evaluate.every": ROUNDS}.items():
        assign(table, path, value)
    run = holdfast.resume(out) if (out / "manifest.json").exists() else holdfast.run(table, out)
    assert isinstance(run, holdfast.Run)
    return (run.metrics["seconds/client"] + run.metrics["seconds/server"]).tolist()[1:]


def table(
    names: list[str], cells: dict[tuple[str, str], SweepCell], seconds: dict[str, float], rounds: int
) -> Table:
    """The most accurate without an attack first."""
    titles, rows = ["method"], []
    titles += ["no attack", "IPM", "LIE", "kB a round, up / down"] if cells else []
    titles += ["seconds a round"] if seconds else []
    for name in names:
        benign = cells[name, "none"].final if cells else None
        row = [Entry(f"`{name}`"), *(_accuracy(cells[name, attack]) for attack in ATTACKS if cells)]
        if cells:
            row.append(
                Entry(
                    " / ".join(f"{benign[f'bytes/{way}'] / rounds / 1000:,.0f}" for way in ("up", "down"))
                    if benign
                    else "–"
                )
            )
        if seconds:
            row.append(Entry(f"{seconds[name]:.3f}", -seconds[name]))
        rows.append(tuple(row))
    rows.sort(key=lambda row: -1.0 if row[1].value is None else row[1].value, reverse=True)
    return Table(tuple(titles), tuple(rows))


def _accuracy(cell: SweepCell) -> Entry:
    """Mean over the benign clients, in brackets over the tenth served worst, per cent."""
    final = cell.final
    if final is None or final["accuracy"] is None:
        return Entry(cell.status)
    diverged = " d" if cell.status == "diverged" else ""
    return Entry(
        f"{100 * final['accuracy']:.1f} ({100 * final['accuracy/worst10']:.1f}){diverged}", final["accuracy"]
    )


if __name__ == "__main__":
    main()
