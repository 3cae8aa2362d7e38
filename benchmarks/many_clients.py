"""Measures the memory of a federation of thousands: 10,000 registered clients on MNIST-sized data, 50 drawn
per round, Ditto's private models on disk.

    python benchmarks/many_clients.py                 # the promise: 200 rounds under 2 GB resident
    python benchmarks/many_clients.py --clients 2000 --cohort 2000 --rounds 2 --memory 200MB

Prints one JSON object: peak resident memory (VmHWM) before and after, seconds per round by part, bytes on
disk."""

from __future__ import annotations

import argparse
import inspect
import json
import tempfile
import time
from pathlib import Path
from typing import Any


def peak() -> int:
    """The process's largest resident memory so far, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) // 1024
    raise RuntimeError("no VmHWM in /proc/self/status: this benchmark needs Linux")


def measure(
    clients: int = 10_000,
    cohort: int = 50,
    rounds: int = 200,
    model: str = "fedcap-cnn",
    method: str = "ditto",
    local_epochs: int = 1,
    plan: str = "auto",
    memory: str = "2GB",
    evaluate: str = "cohort",
    threads: int | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    from holdfast.experiment.config import make_config
    from holdfast.experiment.runner import RunCallbacks
    from holdfast.sweeps.session import start

    config = make_config(
        {
            "method": method,
            "model": model,
            "data": {
                "name": "synthetic",
                "options": {"shape": [1, 28, 28], "samples": 7 * clients, "classes": 62},
                "clients": clients,
                "partition": {"name": "iid", "samples_per_client": 7},
            },
            "train": {
                "rounds": rounds,
                "participation": cohort / clients,
                "local_epochs": local_epochs,
                "batch_size": 10,
                "lr": 0.05,
            },
            "evaluate": {"clients": evaluate},
            "engine": {"plan": plan, "memory": memory, "threads": threads},
        }
    )
    said: list[str] = []
    imported = peak()
    with tempfile.TemporaryDirectory() as folder:
        path = out or Path(folder) / "run"
        started = time.perf_counter()
        result = start([("", config)], path, RunCallbacks(say=said.append))[0]
        seconds = time.perf_counter() - started
        manifest = json.loads((path / "manifest.json").read_text())
        disk = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    final = result["final"]
    return {
        "clients": clients,
        "cohort": cohort,
        "rounds": rounds,
        "parameters": manifest["parameters"],
        "plan": manifest["plan"],
        "peak_mb": peak(),
        "peak_mb_before": imported,
        "disk_mb": disk // 10**6,
        "seconds": round(seconds, 1),
        "seconds_per_round": {
            name: round(final[f"seconds/{name}"] / rounds, 4) for name in ("client", "server", "evaluate")
        },
        "accuracy": final["accuracy"],
        "said": said,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, parameter in inspect.signature(measure).parameters.items():
        kind = {"threads": int, "out": Path}.get(name, type(parameter.default))
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=parameter.default)
    print(json.dumps(measure(**vars(parser.parse_args())), indent=1))
