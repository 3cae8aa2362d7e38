"""Measures the whole table of GPU timings in one call of under 8 minutes, most of it compiling:

    python benchmarks/gpu_table.py --out table.json

It has the workloads of `holdfast bench --device cuda`. One that fails does not stop the others, and results
are written at once."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from holdfast.bench.steps import find_works, run_bench
from holdfast.storage.store import write_json

REACH = {
    ("cifar-20", "compiled-vmap tf32"): 50,
    ("cifar-48x20", "compiled-vmap tf32"): 90,
    ("cifar-48x20", "compiled-vmap bf16"): 120,
    ("ditto-round", "compiled-vmap tf32"): 40,
    ("resnet18-10", "compiled-loop tf32"): 2.3,
}
"""Targets, printed beside the measurements."""


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path, help="a JSON file")
    options.add_argument("--device", default="cuda")
    options.add_argument("--works", nargs="*", help="only these")
    options.add_argument("--quick", action="store_true", help="fewer turns")
    asked = options.parse_args()
    began, whole = time.perf_counter(), {"rows": []}  # type: tuple[float, dict[str, Any]]
    for work in find_works(asked.works, asked.device):
        try:
            result = run_bench([work.name], asked.quick, device=asked.device)
        except Exception as error:
            print(f"{work.name} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        whole = {
            **result,
            "rows": whole["rows"] + result["rows"],
            "seconds": round(time.perf_counter() - began, 1),
        }
        for row in result["rows"]:
            print(_line(row), flush=True)
        print(f"  [{whole['seconds']} s]", flush=True)
        if asked.out:
            write_json(asked.out, whole)
    print(json.dumps({key: value for key, value in whole.items() if key != "rows"}), flush=True)


def _line(row: dict[str, Any]) -> str:
    reach = REACH.get((row["work"], row["plan"]))
    memory = f"  {row['memory'] / 2**30:.2f} GiB" if "memory" in row else ""
    return (
        f"{row['work']:12} {row['plan']:20} {row['seconds'] * 1e6:12.1f} us {row['ratio']:8.2f}x against"
        f" {row['against']}{memory}" + (f"  (to reach: {reach}x)" if reach else "")
    )


if __name__ == "__main__":
    main()
