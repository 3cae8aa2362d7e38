"""The map of defences: every rule, wrapper and detector against every attack, on real data, three seeds.

    python -m benchmarks.defences --scale small --out runs/map --docs  # two datasets, an hour on two cores;
                                                                       # writes docs/defences.md
    python -m benchmarks.defences --scale full --out runs/map-full     # three datasets; for a GPU (not run)
    python -m benchmarks.defences --scale try --out runs/map-try       # digits, two rounds; about a minute
    python -m benchmarks.defences --docs                               # the page again, from the record

The first two need the files of their datasets (docs/data.md). The same command with the same --out continues
after an interruption, and measures only what is missing: after a new part was added, its cells alone.
`--again NAME` measures a defence or an attack again, `--retry` what failed. At the end record and page are
written into --out; with --docs to benchmarks/records and docs/."""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from benchmarks.defence_map import page, record
from benchmarks.defence_map.axes import Attacked, Defence, attacks, chosen, defences
from benchmarks.defence_map.blocks import Block, forget, rows_of, run_all
from benchmarks.defence_map.scales import SCALES, Scale, cells
from holdfast.core.errors import HoldfastError


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", choices=list(SCALES), default="small")
    parser.add_argument(
        "--out", type=Path, help="folder of what is measured, and of the sweeps while they run"
    )
    parser.add_argument("--data", nargs="+", metavar="NAME", help="only these datasets of the scale")
    parser.add_argument("--defences", nargs="+", metavar="NAME", help="only these; mean is always among them")
    parser.add_argument("--attacks", nargs="+", metavar="NAME", help="only these; none is always among them")
    parser.add_argument("--device", help="cpu or cuda; default: that of the scale")
    parser.add_argument(
        "--processes",
        type=int,
        help="blocks that run beside each other; default: one for each core, 1 on a GPU",
    )
    parser.add_argument("--again", nargs="+", metavar="NAME", default=[], help="measure these again")
    parser.add_argument("--retry", action="store_true", help="measure again what failed or did not apply")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the sweeps")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    parser.add_argument(
        "--docs",
        action="store_true",
        help="write to benchmarks/records and docs/; without --out: only docs/, from the record",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    asked = options().parse_args(arguments)
    if asked.docs and asked.out is None:
        page.write(record.read())
        return
    scale = SCALES[asked.scale]
    rows = chosen(asked.defences and ["mean", *asked.defences], defences(scale.parts), "defence")
    columns = chosen(asked.attacks and ["none", *asked.attacks], attacks(scale.parts), "attack")
    names = _data(scale, asked.data)
    blocks = [
        Block(data, attack.name, cells(scale, data, attack, rows, asked.device))
        for data in names
        for attack in columns
    ]
    if asked.list or asked.out is None:
        _tell(rows, columns, names, blocks)
        return
    device = asked.device or scale.device
    processes = asked.processes or (1 if device.startswith("cuda") else os.cpu_count() or 1)
    forget(blocks, asked.out, asked.again, asked.retry)
    try:
        _run(blocks, asked.out, processes, asked.keep)
    except HoldfastError as error:
        raise SystemExit(f"{error}\nthe same command continues") from None
    head = record.head_of(
        command=_command(asked),
        name=asked.scale,
        scale=scale,
        defences=rows,
        attacks=columns,
        date=datetime.date.today().isoformat(),
        device=record.this_machine(device),
        seconds={data: _seconds(blocks, data, asked.out) / processes for data in names},
        processes=processes,
    )
    head["data"] = {data: about for data, about in head["data"].items() if data in names}
    found = record.Record(head, _cells(blocks, asked.out))
    if asked.docs:
        record.write(found)
        page.write(record.read())
    else:
        record.write(found, asked.out)
        page.write(record.read(asked.out), asked.out / "defences.md", asked.out / "img")


def _command(asked: argparse.Namespace) -> str:
    """The command that makes the same record, into any folder."""
    said = ["python", "-m", "benchmarks.defences", "--scale", asked.scale, "--out", "runs/map", "--docs"]
    for name in ("data", "defences", "attacks"):
        said += [f"--{name}", *given] if (given := getattr(asked, name)) else []
    return shlex.join(said + (["--device", asked.device] if asked.device else []))


def _data(scale: Scale, names: Sequence[str] | None) -> list[str]:
    for name in names or ():
        if name not in scale.data:
            raise SystemExit(f"there is no dataset {name!r} at this scale; there are {', '.join(scale.data)}")
    return [name for name in scale.data if not names or name in names]


def _tell(
    rows: Sequence[Defence], columns: Sequence[Attacked], names: Sequence[str], blocks: list[Block]
) -> None:
    print(f"{len(rows)} defences: {', '.join(row.name for row in rows)}")
    print(f"{len(columns)} attacks: {', '.join(f'{one.name} ({one.group})' for one in columns)}")
    print(f"{sum(len(block.cells) for block in blocks):,} cells on {' and '.join(names)}; --out runs them")


def _run(blocks: Sequence[Block], out: Path, processes: int, keep: bool) -> None:
    """Run what is left of all blocks, and say how far it is."""
    left = [block for block in blocks if len(rows_of(block, out)) < len(block.cells)]
    todo = sum(len(block.cells) - len(rows_of(block, out)) for block in left)
    print(f"{todo:,} cells in {len(left)} blocks, {processes} at a time", flush=True)
    for done, (block, ran, spent) in enumerate(run_all(left, out, processes, keep), 1):
        print(
            f"{block.data} {block.attack}: {ran} cells in {spent:.0f} s ({done} of {len(left)})", flush=True
        )


def _cells(blocks: Sequence[Block], out: Path) -> dict[tuple[str, str, str], record.Found]:
    found = {}
    for block in blocks:
        rows = list(rows_of(block, out).values())
        for defence in dict.fromkeys(cell.defence for cell in block.cells):
            mine = [row for row in rows if row["defence"] == defence]
            found[block.data, defence, block.attack] = record.joined(mine)
    return found


def _seconds(blocks: Sequence[Block], data: str, out: Path) -> float:
    """Of all cells of a dataset, whenever they ran."""
    return sum(row["wall"] for block in blocks if block.data == data for row in rows_of(block, out).values())


if __name__ == "__main__":
    main()
