"""Runs a map block by block. A block is one attack on one dataset: all defences and seeds under it are one
sweep, which trains as one stack, or one for each seed where the attack changes inputs.

    OUT/fashion-mnist/lie.json           what was measured, a row for each cell
    OUT/fashion-mnist/lie-3f9a2c1b77e0/  the sweep while it runs; removed when it is measured

A block continues where it was stopped. Cells that are measured already are not run again, so a new part or
a new setting costs only its own cells. A cell that cannot be built, or that fails, has a row with the
reason."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.defence_map.measured import measured
from benchmarks.defence_map.scales import Cell, digest_of
from holdfast.core.errors import StoreError
from holdfast.core.files import write_json
from holdfast.data.samples import Samples
from holdfast.experiment.build import shared_samples
from holdfast.experiment.config import make_config
from holdfast.experiment.loop import Experiment
from holdfast.experiment.manifest import is_sweep
from holdfast.storage.status import one_line
from holdfast.sweeps.runner import sweep

Row = dict[str, Any]


@dataclass(frozen=True)
class Block:
    """One attack on one dataset."""

    data: str
    attack: str
    cells: Sequence[Cell]

    def file(self, out: Path) -> Path:
        return out / self.data / f"{self.attack}.json"


def rows_of(block: Block, out: Path) -> dict[str, Row]:
    """What is measured of these cells, by the digest of their settings."""
    wanted = {cell.digest for cell in block.cells}
    return {digest: row for digest, row in _read(block.file(out)).items() if digest in wanted}


def _read(file: Path) -> dict[str, Row]:
    return json.loads(file.read_text())["rows"] if file.exists() else {}


def forget(blocks: Iterable[Block], out: Path, again: Sequence[str], retry: bool) -> None:
    """Remove rows that are to be measured again: of these defences or attacks, or of cells that failed."""
    for block in blocks:
        rows = _read(block.file(out))
        kept = {
            digest: row
            for digest, row in rows.items()
            if not {row["defence"], row["attack"]} & {*again} and not (retry and row.get("accuracy") is None)
        }
        if len(kept) < len(rows):
            write_json(block.file(out), {"rows": kept})


def run_block(block: Block, out: Path, keep: bool = False) -> tuple[int, float]:
    """Run what is left of a block. Returns how many cells those were, and how many seconds it took."""
    began, known = time.perf_counter(), rows_of(block, out)
    left = [cell for cell in block.cells if cell.digest not in known]
    if not left:
        return 0, 0.0
    folder = out / block.data / f"{block.attack}-{digest_of([cell.digest for cell in left])}"
    found = _swept(left, folder)
    spent = time.perf_counter() - began
    rows = {cell.digest: _row(cell, found[cell.digest], spent / len(left)) for cell in left}
    write_json(block.file(out), {"rows": {**_read(block.file(out)), **rows}})
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
        _refusals(folder).unlink(missing_ok=True)
    return len(left), spent


def _row(cell: Cell, found: Row, share: float) -> Row:
    """`share` is the cell's part of the seconds of its block."""
    named = {"defence": cell.defence, "attack": cell.attack, "seed": cell.seed}
    return {**named, **found, "wall": round(share, 4)}


def _swept(cells: Sequence[Cell], folder: Path) -> dict[str, Row]:
    """Run these cells as one sweep. A mistake in one cell stops a sweep before it begins: then each is tried
    alone, and the sweep begins without those that cannot be built. Which those are is written, so that it is
    continued with the same cells."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = _refusals(folder)
    refused: dict[str, Row] = json.loads(file.read_text()) if file.exists() else {}
    try:
        return refused | _measured(cells, folder, refused)
    except StoreError:
        raise
    except Exception:
        if is_sweep(folder) or refused:
            raise
        refused = _refused(cells, folder)
        if not refused:
            raise
    write_json(file, refused)
    return refused | _measured(cells, folder, refused)


def _measured(cells: Sequence[Cell], folder: Path, refused: Mapping[str, Row]) -> dict[str, Row]:
    wanted = [cell for cell in cells if cell.digest not in refused]
    if not wanted:
        return {}
    statuses = sweep([(cell.label, make_config(cell.table)) for cell in wanted], folder)
    return {cell.digest: measured(status) for cell, status in zip(wanted, statuses, strict=True)}


def _refusals(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-refused.json")


def _refused(cells: Sequence[Cell], folder: Path) -> dict[str, Row]:
    """The cells that cannot be built, and why."""
    samples: list[Samples] = []
    found = {}
    for cell in cells:
        try:
            config = make_config(cell.table)
            config.parts()
            samples = samples or shared_samples([config])
            Experiment(config, folder, cell.label, samples[0])
        except Exception as error:
            found[cell.digest] = {"note": one_line(error)}
    return found


def run_all(
    blocks: Sequence[Block], out: Path, processes: int, keep: bool = False
) -> Iterator[tuple[Block, int, float]]:
    """Run blocks, several beside each other; yields each when it is done. The processes end with this one."""
    work = partial(run_block, out=out, keep=keep)
    if processes < 2:
        yield from ((block, *work(block)) for block in blocks)
        return
    with ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=_end_with, initargs=(os.getpid(),)
    ) as pool:
        asked = {pool.submit(work, block): block for block in blocks}
        try:
            for done in as_completed(asked):
                yield asked[done], *done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with(parent: int) -> None:
    """End this process when its parent is gone, however that ended: a sweep may be killed at any moment."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
