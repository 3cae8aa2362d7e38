"""Compares a device with the CPU: every method in float64 (weights, accuracy and other metrics), and the same
run twice in float32, bit for bit; every aggregator, alone and in every wrapper, on the same updates; every
attack in a run:

    python benchmarks/devices.py cuda
    python benchmarks/devices.py cuda rules attacks      # only these two parts of it
    python benchmarks/devices.py cuda fedcap fedas       # only these methods


"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

import holdfast
from holdfast.aggregators.base import AggregationContext
from holdfast.core.errors import ConfigError
from holdfast.core.flat import Layout, Slot
from holdfast.core.keys import Key
from holdfast.core.registry import parts
from holdfast.evaluation.scores import METRICS
from holdfast.experiment.config import make_config

_SETTINGS = {"gas": {"p": 7}, "backdoor": {"size": 2}}  # for small networks and images


def run_case(
    folder: Path, method: str, device: str, plan: str, dtype: str
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """All weights of two rounds of a small network with BatchNorm and Dropout on ragged clients; accuracy and
    other metrics; seconds."""
    started = time.perf_counter()
    run = holdfast.run(
        method=method,
        model="cnn-bn",
        data={"clients": 6, "partition": {"name": "dirichlet", "beta": 0.3}},
        train={"rounds": 2, "local_epochs": 1, "dtype": dtype, "participation": 0.7},
        engine={"device": device, "plan": plan},
        evaluate={"metrics": METRICS},
        out=folder / f"{method}-{device}-{plan}-{dtype}-{time.time_ns()}",
    )
    clients = [
        run.vector(client=c, model="personal" if "personal" in run._experiment.method.models else None)
        for c in range(6)
    ]
    figures = torch.tensor([run.final[name] for name in ("accuracy", *METRICS)])
    return torch.cat(clients).cpu(), figures, time.perf_counter() - started


def rules(device: str) -> None:
    """The aggregate of 12 updates, of which two are far out, on both devices."""
    x = Key(0).fold("x").normal(12, 400).double()
    x[:2] += 50
    layout = Layout(
        (
            Slot("a", (300,), 0, 300, x.dtype, False, False),
            Slot("b", (10, 10), 300, 400, x.dtype, False, False),
        )
    )
    for name in parts("aggregator"):
        for wrapper in (None, *parts("wrapper")):
            wrap = [{"name": wrapper, **_SETTINGS.get(wrapper, {})}] if wrapper else []
            try:
                config = make_config(
                    {"aggregator": {"name": name, "f": 2, "wrap": wrap}, "data": {"clients": 40, "root": 20}}
                )
                rule = config.parts().aggregator
            except ConfigError:  # a combination without sense
                continue
            values = []
            for where in ("cpu", device):
                own = x.to(where)
                ctx = AggregationContext(
                    torch.arange(12),
                    own[0] * 0 + 1,
                    layout,
                    Key(1),
                    1,
                    2,
                    own[5] if "root" in rule.needs else None,
                )
                values.append(rule(own, own.new_full((12,), 1 / 12), rule.init(layout), ctx).value.cpu())
            print(
                f"{name:14} {wrapper or '':10} {device} against cpu:"
                f" {float((values[0] - values[1]).abs().max()):.1e}",
                flush=True,
            )


def attacks(device: str, folder: Path) -> None:
    """Two rounds under each attack."""
    for name in parts("attack"):
        vectors = []
        for place, where in enumerate(("cpu", device)):
            run = holdfast.run(
                method="fedavg",
                model="cnn-bn",
                attack={"name": name, "fraction": 0.4, **_SETTINGS.get(name, {})},
                data={"clients": 6},
                train={"rounds": 2, "local_epochs": 1, "dtype": "float64"},
                engine={"device": where, "plan": "vmap"},
                out=folder / f"{name}-{place}",
            )
            vectors.append(run.vector().cpu())
        print(
            f"{name:14} {device} against cpu: {float((vectors[0] - vectors[1]).abs().max()):.1e}", flush=True
        )


def methods(device: str, folder: Path, names: list[str]) -> None:
    for method in names:
        base, figures, _ = run_case(folder, method, "cpu", "loop", "float64")
        for plan in ("loop", "vmap", "captured-loop", "captured-vmap", "compiled-vmap"):
            weights, there, seconds = run_case(folder, method, device, plan, "float64")
            once, again = (run_case(folder, method, device, plan, "float32")[0] for _ in range(2))
            print(
                f"{method:10} {device} {plan:13} against cpu: {float((weights - base).abs().max()):.1e} "
                f" figures: {float((there - figures).abs().max()):.1e}  float32 twice:"
                f" {'same bits' if torch.equal(once, again) else 'OTHER BITS'}  {seconds:.1f} s",
                flush=True,
            )


def main(device: str, asked: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if "rules" in asked:
            rules(device)
        if "attacks" in asked:
            attacks(device, Path(folder))
        methods(
            device,
            Path(folder),
            (
                list(parts("method"))
                if "methods" in asked
                else [name for name in asked if name in parts("method")]
            ),
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu", sys.argv[2:] or ["rules", "attacks", "methods"])
