"""Compares the bits that two versions of the code give, by digests of small runs of every method, alone and
fused, on two plans.

    python benchmarks/bits.py --out before.json                        # with the old code
    python benchmarks/bits.py --out after.json --against before.json   # with the new code: says which differ

Each run is float32 on the embedded digits, three rounds. Its digest covers the server's state, every client's
private state, and all arrays of every round. A run that one of the two versions cannot start is listed with
its error."""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.core.registry import parts
from holdfast.results.run import Run

ATTACKED = {"attack": {"name": "ipm", "fraction": 0.3}, "aggregator": {"name": "median"}}
MODEL = {"name": "mlp", "hidden": 8, "batch_norm": True, "dropout": 0.2}


def base(method: str, plan: str) -> dict[str, Any]:
    return {
        "method": {"name": method},
        "model": MODEL,
        "data": {
            "clients": 6,
            "partition": {"name": "dirichlet", "beta": 0.5, "min_samples": 6, "samples_per_client": 30},
            "split": {"train": 0.6, "validation": 0.15, "test": 0.25},
        },
        "train": {
            "rounds": 3,
            "local_epochs": 2,
            "batch_size": 5,
            "lr": 0.05,
            "momentum": 0.5,
            "participation": 0.7,
        },
        "engine": {"plan": plan, "threads": 1, "workers": 1},
    }


def sweeps(method: str, plan: str) -> dict[str, dict[str, Any]]:
    """Return the runs of a method: alone, under attack if it aggregates updates, and as a sweep whose cells
    are fused."""
    plain = base(method, plan)
    out = {f"{method} {plan} alone": plain}
    if parts("method")[method].reduces:  # type: ignore[attr-defined]
        out[f"{method} {plan} attacked"] = {**plain, **ATTACKED}
    out[f"{method} {plan} fused"] = {**plain, "sweep": {"seed": [0, 1], "train.lr": [0.05, 0.02]}}
    return out


def digest(run: Run) -> str:
    """Return a digest of all numbers of a run."""
    head = run.store.head()
    assert head is not None
    found = {name: value for name, value in head[1].items() if name.startswith(("server/", "roster/"))}
    rows = run._experiment.run_context.rows.__class__(run.path / "rows", head[1]["rows/index"])
    ids = torch.tensor(sorted(rows.place), dtype=torch.int64)
    if len(ids):
        found |= {f"rows/{name}": value for name, value in rows.read(ids).items()}
    for round in range(1, head[0] + 1):
        found |= {f"{round}/{name}": value for name, value in run.store.arrays(round).items()}
    whole = hashlib.sha256()
    for name in sorted(found):
        whole.update(name.encode())
        whole.update(
            found[name].reshape(-1).view(torch.uint8).numpy().tobytes() if found[name].numel() else b""
        )
    return whole.hexdigest()[:16]


def measured(config: dict[str, Any], folder: Path) -> list[str]:
    try:
        if "sweep" in config:
            cells = holdfast.sweep(config, out=folder)
            return [
                digest(cell.run) if cell.run is not None else f"{cell.status}: {cell.reason}"
                for cell in cells
            ]
        return [digest(holdfast.run(config, out=folder))]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--methods", nargs="*", default=list(parts("method")))
    options.add_argument("--plans", nargs="*", default=["loop", "vmap"])
    options.add_argument("--out", type=Path)
    options.add_argument("--against", type=Path, help="digests of another version")
    asked = options.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for method in asked.methods:
            for plan in asked.plans:
                for place, (name, config) in enumerate(sweeps(method, plan).items()):
                    found[name] = measured(config, Path(folder) / f"{method}-{plan}-{place}")
                    print(name, *found[name], flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1))
    if asked.against:
        known = {
            name: digests
            for name, digests in json.loads(asked.against.read_text()).items()
            if name.split()[0] in asked.methods and name.split()[1] in asked.plans
        }
        both = found.keys() & known.keys()
        differ, alone = (
            sorted(name for name in both if found[name] != known[name]),
            sorted(found.keys() ^ known.keys()),
        )
        print(
            f"{len(both) - len(differ)} equal, {len(differ)} differ: {differ}, {len(alone)} in one version"
            f" only: {alone}"
        )


if __name__ == "__main__":
    main()
