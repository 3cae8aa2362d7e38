"""Measures how time and memory grow with clients, with cells of a sweep and with the size of a model; writes
a table, JSON and plots as SVG:

    python benchmarks/growth.py cpu --out growth-cpu.json --plots docs/img
    python benchmarks/growth.py cuda --out growth-cuda.json --plots docs/img

Every point is measured in a process of its own, so that its peak of memory is its own; the best of a few
turns counts."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from plot import Line, log_plot

TURNS = 3
POINTS: dict[str, dict[str, list[tuple[str, dict[str, Any]]]]] = {
    "cpu": {
        "clients": [
            (f"{model} {plan}", {"kind": "fit", "model": model, "clients": n, "plan": plan, "device": "cpu"})
            for model, counts in (("mlp-64", (10, 30, 100, 300, 1000)), ("cnn28", (5, 20, 80, 320)))
            for plan in ("loop", "vmap")
            for n in counts
        ],
        "cells": [
            ("", {"kind": "sweep", "cells": k, "device": "cpu", "plan": plan})
            for plan in ("loop", "vmap")
            for k in (1, 4, 16, 64)
        ],
        "parameters": [
            (plan, {"kind": "fit", "model": f"mlp-{width}", "clients": 20, "plan": plan, "device": "cpu"})
            for plan in ("loop", "vmap")
            for width in (16, 64, 256, 1024, 4096)
        ],
    },
    "cuda": {
        "clients": [
            (plan, {"kind": "fit", "model": "cnn32", "clients": n, "plan": plan, "device": "cuda"})
            for plan in ("captured-vmap", "compiled-vmap")
            for n in (20, 100, 480, 960)
        ],
    },
}


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("device", choices=POINTS)
    options.add_argument("--out", type=Path)
    options.add_argument("--plots", type=Path)
    options.add_argument("--only", choices=("clients", "cells", "parameters"))
    options.add_argument("--point", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.point:
        print(json.dumps(_measure(json.loads(asked.point))))
        return
    found: dict[str, list[dict[str, Any]]] = {}
    for axis, points in POINTS[asked.device].items():
        for _, point in points if asked.only in (None, axis) else ():
            row = point | _in_its_own_process(asked.device, point)
            found.setdefault(axis, []).append(row)
            print(axis, row, flush=True)
            if asked.out:
                asked.out.write_text(json.dumps(found, indent=1) + "\n")
    if asked.plots:
        draw(found, asked.device, asked.plots)


def _in_its_own_process(device: str, point: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, device, "--point", json.dumps(point)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def _measure(point: dict[str, Any]) -> dict[str, Any]:
    return _fit(point) if point["kind"] == "fit" else _sweep(point)


def _fit(point: dict[str, Any]) -> dict[str, Any]:
    """Microseconds of one step of one client, and the memory that the training adds."""
    import torch

    from holdfast.bench.steps import Bench, Work
    from holdfast.local.plan import Plan

    model, _, width = point["model"].partition("-")
    if model == "mlp":
        work = Work(
            "",
            {"name": "mlp", "hidden": int(width)},
            {"name": "digits"},
            point["clients"],
            20,
            device=point["device"],
        )
    else:
        shape = (1, 28, 28) if model == "cnn28" else (3, 32, 32)
        work = Work(
            "",
            {"name": "fedcap-cnn"},
            {"name": "synthetic", "shape": shape},
            point["clients"],
            100,
            device=point["device"],
        )
    bench = Bench.of(work)
    before = _memory(point["device"])
    plan = bench.choose(point["plan"]) if point["device"] == "cpu" else Plan(point["plan"], precision="tf32")
    for _ in range(TURNS):
        bench._clock("it", plan, lambda: bench.fit(plan))
    seconds = bench.seconds["it"]
    added, parameters = _memory(point["device"]) - before, bench.network.layout.parameters
    return {
        "microseconds": seconds * 1e6,
        "megabytes": added / 1e6,
        "parameters": parameters,
        "threads": torch.get_num_threads(),
    }


def _sweep(point: dict[str, Any]) -> dict[str, Any]:
    """Return the milliseconds of a round of one cell when this many cells of 10 digits clients run together;
    all of a round counts."""
    import holdfast
    from holdfast.experiment.runner import RunCallbacks

    ends: list[float] = []
    rounds: dict[int, int] = {}

    def moved(experiment: Any) -> None:
        if rounds.get(id(experiment), 0) < experiment.run_context.round:
            rounds[id(experiment)] = experiment.run_context.round
            ends.append(time.perf_counter())

    config = {
        "data": {"clients": 10},
        "train": {"rounds": 12, "local_epochs": 1},
        "sweep": {"seed": list(range(point["cells"]))},
        "engine": {"plan": point["plan"], "device": point["device"], "threads": 1, "workers": 1},
    }
    before = _memory(point["device"])
    with tempfile.TemporaryDirectory() as folder:
        holdfast.sweep(config, Path(folder) / "sweep", watch=RunCallbacks(moved=moved))
    first = ends[2 * point["cells"]]  # after two rounds of warming up
    taken = (ends[-1] - first) / (len(ends) - 1 - 2 * point["cells"])
    return {"milliseconds": taken * 1e3, "megabytes": (_memory(point["device"]) - before) / 1e6}


def _memory(device: str) -> float:
    import torch

    if device == "cuda":
        return float(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def draw(found: dict[str, list[dict[str, Any]]], device: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {
        "clients": "clients in a stack",
        "cells": "cells that run together",
        "parameters": "parameters of the model",
    }
    for axis, rows in found.items():
        labels = [label or row["plan"] for (label, _), row in zip(POINTS[device][axis], rows, strict=True)]
        good = [(label, row) for label, row in zip(labels, rows, strict=True) if "failed" not in row]
        time_of = (
            ("milliseconds", "of a round of one cell")
            if axis == "cells"
            else ("microseconds", "of a client step")
        )
        for quantity, what in (time_of, ("megabytes", "that the training adds")):
            lines = [
                Line(name, [(row[axis], row[quantity]) for label, row in good if label == name])
                for name in dict.fromkeys(labels)
            ]
            (folder / f"growth-{device}-{axis}-{quantity}.svg").write_text(
                log_plot(lines, names[axis], f"{quantity} {what}")
            )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    main()
