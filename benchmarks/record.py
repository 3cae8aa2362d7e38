"""Runs the commands of docs/reproduction.md again:

    python benchmarks/record.py                          # list them
    python benchmarks/record.py 0 3                      # run these, one after the other
    python benchmarks/record.py 3 4 5 --at-once 2        # two at a time
    python benchmarks/record.py "fedas table-3"          # all whose command contains these words

Each has its folder and its log under --out. The same call continues after an interruption and repeats
nothing."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reproduction.md"


def commands(page: str) -> list[str]:
    """Return every `holdfast reproduce ...` of the page, in order, each once."""
    return list(
        dict.fromkeys(" ".join(found.split()) for found in re.findall(r"`(holdfast reproduce [^`]+)`", page))
    )


def chosen(asked: list[str], known: list[str]) -> list[int]:
    """Return the commands that were asked for, by number or by words that they contain."""
    found: list[int] = []
    for one in asked:
        numbers = (
            [int(one)]
            if one.isdigit()
            else [number for number, command in enumerate(known) if one in command]
        )
        if not numbers or max(numbers) >= len(known):
            sys.exit(f"there is no command {one!r}; without arguments: which there are")
        found += numbers
    return list(dict.fromkeys(found))


def run_case(number: int, command: str, out: Path) -> int:
    _, _, paper, what, *rest = shlex.split(command)
    name = f"{number:02d}-{paper}-{what}"
    began = time.perf_counter()
    print(f"{name}: {command}", flush=True)
    with open(out / f"{name}.log", "a") as log:
        arguments = [
            sys.executable,
            "-m",
            "holdfast.cli",
            "reproduce",
            paper,
            what,
            *rest,
            "--out",
            str(out / name),
        ]
        code = subprocess.run(arguments, stdout=log, stderr=subprocess.STDOUT).returncode
    print(
        f"{name}: {'done' if code == 0 else f'failed ({code}), see {log.name},'} after"
        f" {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    return code


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("which", nargs="*", help="numbers, or parts of commands")
    options.add_argument(
        "--at-once", type=int, default=1, help="on one GPU no more than two: they share its memory"
    )
    options.add_argument("--out", type=Path, default=Path("reproductions/record"))
    asked = options.parse_args()
    known = commands(PAGE.read_text())
    if not asked.which:
        print("\n".join(f"{number:2d}  {command}" for number, command in enumerate(known)))
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max(1, asked.at_once)) as pool:
        codes = list(
            pool.map(lambda number: run_case(number, known[number], asked.out), chosen(asked.which, known))
        )
    sys.exit(int(any(codes)))


if __name__ == "__main__":
    main()
