"""Every method on a device against the CPU in float64 (weights, accuracy and the other metrics), and the same run twice in float32, bit
for bit:

    python benchmarks/devices.py cuda
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

import holdfast
from holdfast.core.registry import parts
from holdfast.tally import METRICS


def play(folder: Path, method: str, device: str, plan: str, dtype: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """All weights of two rounds of a small network with BatchNorm and Dropout on ragged clients; accuracy and other metrics; seconds."""
    started = time.perf_counter()
    run = holdfast.run(
        method=method, model="cnn-bn", data={"clients": 6, "partition": {"name": "dirichlet", "beta": 0.3}},
        train={"rounds": 2, "local_epochs": 1, "dtype": dtype, "participation": 0.7}, engine={"device": device, "plan": plan},
        evaluate={"metrics": METRICS}, out=folder / f"{method}-{device}-{plan}-{dtype}-{time.time_ns()}",
    )  # fmt: skip
    clients = [run.vector(client=c, model="personal" if "personal" in run._experiment.method.models else None) for c in range(6)]
    figures = torch.tensor([run.final[name] for name in ("accuracy", *METRICS)])
    return torch.cat(clients).cpu(), figures, time.perf_counter() - started


def main(device: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for method in parts("method"):
            base, figures, _ = play(Path(folder), method, "cpu", "loop", "float64")
            for plan in ("loop", "vmap", "captured-loop", "captured-vmap", "compiled-vmap"):
                weights, there, seconds = play(Path(folder), method, device, plan, "float64")
                once, again = (play(Path(folder), method, device, plan, "float32")[0] for _ in range(2))
                print(
                    f"{method:10} {device} {plan:13} against cpu: {float((weights - base).abs().max()):.1e}"
                    f"  figures: {float((there - figures).abs().max()):.1e}"
                    f"  float32 twice: {'same bits' if torch.equal(once, again) else 'OTHER BITS'}  {seconds:.1f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
