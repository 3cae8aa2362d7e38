"""The command line of the soak."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import benchmarks.soak
from benchmarks.soak import local
from benchmarks.soak.course import Course
from benchmarks.soak.record import Disturbance, Outcome, as_json, markdown, show, write_into

PARTS = ("run", "sweep", "federation")
SHARES = {"run": 0.4, "sweep": 0.3, "federation": 0.3}
"""Of the kills: those of a federation take a minute each, for Flower believes in a dead process for that
long."""
ROUNDS = {"run": 120, "sweep": 40}


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.soak",
        description=benchmarks.soak.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--kills",
        type=int,
        default=100,
        help="in all; freezes, cut connections, full disks and restarts come on top",
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--victims",
        nargs="+",
        metavar="ROLE",
        help="federation: kill only these, and disturb nothing else: SuperNode ...",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="begin no disturbance after so many; what has begun is finished and compared",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole record there")
    parser.add_argument("--markdown", action="store_true", help="print the record as Markdown too")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put it between the markers of this page")
    parser.add_argument("--keep", action="store_true", help="do not remove the folder of the soak at the end")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outcomes = run_case(
        given.seed, shares(given.kills, given.only), given.minutes, given.keep, console(), given.victims
    )
    if given.json is not None:
        given.json.write_text(json.dumps(as_json(outcomes, given.seed), indent=1) + "\n")
    if given.markdown:
        print(markdown(outcomes, given.seed))
    if given.write is not None:
        write_into(given.write, markdown(outcomes, given.seed))
    return 0 if all(outcome.held for outcome in outcomes) else 1


def console() -> Console:
    """Wide where it is no terminal: the table is for a file then."""
    usual = Console(soft_wrap=True)
    return usual if usual.is_terminal else Console(soft_wrap=True, width=160)


def shares(kills: int, parts: list[str]) -> dict[str, int]:
    """How many kills each part has."""
    chosen = [part for part in PARTS if part in parts]
    whole = sum(SHARES[part] for part in chosen)
    many = {part: round(kills * SHARES[part] / whole) for part in chosen}
    many[chosen[0]] += kills - sum(many.values())
    return many


def run_case(
    seed: int,
    kills: dict[str, int],
    minutes: float | None,
    keep: bool,
    console: Console,
    victims: list[str] | None = None,
) -> list[Outcome]:
    work = Path(tempfile.mkdtemp(prefix="soak-"))
    course = Course(seed, work, console, float("inf") if minutes is None else time.monotonic() + 60 * minutes)
    console.print(
        f"seed {seed}, {sum(kills.values())} kills:"
        f" {', '.join(f'{part} {many}' for part, many in kills.items())}; in {work}"
    )
    outcomes: list[Outcome] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            for part, many in kills.items():
                task = progress.add_task(part, total=many)

                def said(one: Disturbance, task: int = task) -> None:
                    progress.advance(task, one.kind == "kill")  # type: ignore[arg-type]

                course.said = said
                outcomes.append(Outcome(part))
                _part(course, outcomes[-1], many, victims)
    except KeyboardInterrupt:
        console.print("interrupted; what was done so far:")
    finally:
        course.end_all()
        held = all(outcome.held for outcome in outcomes)
        if held and not keep:
            shutil.rmtree(work, ignore_errors=True)
        else:
            console.print(f"everything of this soak is in {work}")
    show(outcomes, seed, console)
    return outcomes


def _part(course: Course, outcome: Outcome, kills: int, victims: list[str] | None) -> None:
    began, others = time.monotonic(), 2 if kills >= 20 else 1
    try:
        if outcome.part in ROUNDS:
            local.soak(course, outcome, kills, ROUNDS[outcome.part], others)
        else:
            from benchmarks.soak import federation  # needs Flower

            federation.soak(course, outcome, kills, 0 if victims else others, victims or federation.ROLES)
        outcome.finished = True
    finally:
        outcome.seconds = time.monotonic() - began


if __name__ == "__main__":
    raise SystemExit(main())
