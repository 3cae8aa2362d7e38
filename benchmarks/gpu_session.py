"""Everything that a session with a GPU measures about whole rounds on it, part after part, each a process
with a time limit of its own:

    python benchmarks/gpu_session.py --out FOLDER                     # all parts; about an hour
    python benchmarks/gpu_session.py --out FOLDER --parts steps same  # some, for machines lent by the minute
    python benchmarks/gpu_session.py --list                           # what each part measures
    python benchmarks/gpu_session.py --out FOLDER --dry-run           # the commands alone

What a part prints goes to FOLDER/PART.log as it comes, and what it measured to FOLDER/session.json after each
part. A part that fails or runs past its limit does not stop the others. `table-1` and `table-3` need images
(`HOLDFAST_DATA`); each reports the seconds of its rounds by the times at which the first cell committed
them."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.files import write_json

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Part:
    """A measurement: a command, in which OUT stands for the part's own folder, and its limit in seconds."""

    what: str
    command: tuple[str, ...]
    limit: float
    runs: bool = False
    """Whether it leaves runs, whose rounds are timed."""


def script(name: str, *options: str) -> tuple[str, ...]:
    return (sys.executable, str(HERE / name), *options)


def holdfast(*options: str) -> tuple[str, ...]:
    return (sys.executable, "-c", "from holdfast.cli import main; main()", *options)


TABLE_1 = ("reproduce", "fedcap", "I", "--scale", "full", "--only", "dataset=CIFAR-10", "--device", "cuda")
TABLE_3 = (
    *("reproduce", "fedas", "table-3", "--scale", "full", "--variant", "both", "--only", "P=0.2,1"),
    *("--only", "method=FedAvg-P,FedPer,Ditto,FedBABU,FedALA,FedPAC,FedAS", "--seeds", "3"),
    *("--set", "data.partition.samples_per_client=400", "--set", "train.rounds=20", "--device", "cuda"),
)
RANKS = (
    "run",
    *(
        f"--set={one}"
        for one in (
            "method.name=ditto",
            "aggregator.name=multi-krum",
            "aggregator.f=2",
            "data.clients=20",
            "attack.name=min-max",
            "attack.knows=everyone",
            "train.rounds=10",
        )
    ),
)
PARTS = {
    "same": Part(
        "servers, attacks and screening on the GPU against the CPU, in float64; the same bits twice",
        script("devices.py", "cuda"),
        500,
    ),
    "plans": Part("every plan against `loop` on the CPU", script("equal_plans.py", "cuda"), 500),
    "steps": Part(
        "steps of a client and a whole round, as ratios to a plain loop",
        script("gpu_table.py", "--out", "OUT/table.json"),
        560,
    ),
    "host": Part(
        "48 experiments whose clients send noise: servers on the host and on the GPU, by turns",
        script("host.py", "--device", "cuda", "--servers", "host", "device", "--turns", "3"),
        400,
    ),
    "rules": Part(
        "aggregates of 48 experiments one by one and together",
        script("together.py", "--device", "cuda"),
        200,
    ),
    "timeline": Part(
        "what GPU and host do in a round: a picture, and the share of it in which the GPU works",
        script("timeline.py", "--device", "cuda", "--out", "OUT"),
        400,
    ),
    "kernel": Part(
        "Triton kernels for convolutions against the matrix product",
        script("convolution_kernel.py", "--out", "OUT/kernel.json"),
        590,
    ),
    "bytes": Part(
        "what a step writes at each precision, and the memory of programs",
        script("activation_bytes.py"),
        200,
    ),
    "ranks": Part(
        "two ranks that share one GPU: only that the path runs, since both go through the host",
        holdfast(*RANKS, "--devices", "cuda:0,cuda:0"),
        120,
        True,
    ),
    "table-1": Part("FedCAP's Table I on CIFAR-10, from command to page", holdfast(*TABLE_1), 590, True),
    "table-1-again": Part("the same once more: compiled code is kept", holdfast(*TABLE_1), 590, True),
    "table-1-host": Part(
        "the same with servers on the host", holdfast(*TABLE_1, "--set", "engine.server=host"), 590, True
    ),
    "table-3": Part("FedAS Table 3: seconds of a round", holdfast(*TABLE_3), 590, True),
}


def round_seconds(folder: Path) -> list[float]:
    """Seconds between the rounds of the cell with the most of them."""
    found: list[list[float]] = [
        sorted(file.stat().st_mtime for file in parts.glob("[0-9]*.json")) for parts in folder.rglob("parts")
    ]
    longest = max(found, key=len, default=[])
    return [round(after - before, 3) for before, after in itertools.pairwise(longest)]


def perform(name: str, part: Part, out: Path) -> dict[str, Any]:
    """Run one part to its end or its limit."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    command = [word.replace("OUT", str(folder)) for word in part.command]
    if part.runs:
        command += ["--out", str(folder / "runs")]
    began, code = time.perf_counter(), -1
    with open(out / f"{name}.log", "w") as log:
        try:
            path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
            environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
            code = subprocess.run(
                command, stdout=log, stderr=log, timeout=part.limit, env=environment, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            log.write(f"\nstopped after {part.limit:g} s\n")
    found: dict[str, Any] = {
        "command": shlex.join(part.command[1:]),
        "exit": code,
        "seconds": round(time.perf_counter() - began, 1),
    }
    if part.runs:
        found["rounds"] = round_seconds(folder)
    return found


def main(given: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--out", type=Path, default=Path("gpu-session"), help="a folder for logs and results"
    )
    options.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    options.add_argument("--list", action="store_true", help="say what each part measures")
    options.add_argument("--dry-run", action="store_true", help="print the commands and run none")
    asked = options.parse_args(given)
    if asked.list or asked.dry_run:
        for name in asked.parts:
            part = PARTS[name]
            print(f"{name:14} " + (part.what if asked.list else shlex.join(part.command)))
        return
    found: dict[str, Any] = {}
    for name in asked.parts:
        print(f"{name}: {PARTS[name].what}", flush=True)
        found[name] = perform(name, PARTS[name], asked.out)
        print(f"  exit {found[name]['exit']}, {found[name]['seconds']} s", flush=True)
        write_json(asked.out / "session.json", found)
    print(json.dumps({name: part["seconds"] for name, part in found.items()}))


if __name__ == "__main__":
    main()
