"""How long until the first round begins: the first start on a dataset, which decodes it, tries plans and
compiles, and the second, which finds all that in the cache.

    HOLDFAST_DATA=... python benchmarks/second_start.py
    python benchmarks/second_start.py --data mnist --plan loop --turns 5 --json
    HOLDFAST_DATA=... python benchmarks/second_start.py --device cuda --plan auto --rounds 1000
    python benchmarks/second_start.py --compile    # code of one network for a CPU

Every start is a process of its own, and the clock starts when torch has been imported. The first start of
each plan has an empty cache; of the second starts the median counts. "ends" is after one round; with --rounds
the choice of a plan sees a run of so many rounds, which is stopped after the first."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

CLIENTS = 20


def start_once(data: str, plan: str, device: str, rounds: int) -> dict[str, float]:
    """In a process of its own: seconds from the end of torch's import to each stage."""
    import torch  # noqa: F401

    begun = time.perf_counter()
    marks: dict[str, float] = {}

    def mark(name: str) -> None:
        marks[name] = time.perf_counter() - begun

    from holdfast.data import federation
    from holdfast.experiment.config import make_config
    from holdfast.experiment.runner import RunCallbacks
    from holdfast.sweeps.session import start

    mark("imported")
    config = make_config(
        {
            "method": "fedavg",
            "model": "fedcap-cnn",
            "data": {"name": data, "clients": CLIENTS},
            "train": {"rounds": rounds, "local_steps": 1}
            if rounds == 1
            else {"rounds": rounds, "local_epochs": 5},
            "engine": {"plan": plan, "device": device},
        }
    )
    load = federation.load_samples

    def loaded(*args: Any) -> Any:
        samples = load(*args)
        mark("data")
        return samples

    federation.load_samples = loaded  # type: ignore[assignment]

    class FirstRoundEnded(BaseException):
        pass

    def moved(experiment: Any) -> None:
        if experiment.store.round():
            mark("ends")
            raise FirstRoundEnded

    watch = RunCallbacks(planned=lambda _: mark("first round"), moved=moved)
    with tempfile.TemporaryDirectory() as folder, suppress(FirstRoundEnded):
        start([("", config)], Path(folder) / "run", watch)
    return marks


def compile_once() -> dict[str, float]:
    """In a process of its own: seconds to trace the step of 20 clients and of 10, and to make or find their
    code; the second is made ahead by another process."""
    import torch

    from holdfast.core.keys import Key
    from holdfast.core.registry import build
    from holdfast.data.federation import Padded
    from holdfast.local import compiled_code
    from holdfast.local.compile_ahead import compile_ahead
    from holdfast.local.fit import Recipe, stack_of
    from holdfast.local.plan import Plan
    from holdfast.local.programs import traced
    from holdfast.models.network import Network

    begun, cpu = time.perf_counter(), torch.device("cpu")
    marks: dict[str, float] = {}
    samples = build("source", {"name": "synthetic", "shape": (3, 32, 32)}).load(None)
    model = build("model", {"name": "fedcap-cnn"})
    network = Network(lambda: model.build(samples.sample_shape, samples.classes), signature="fedcap-cnn")
    jobs = []
    for clients in (CLIENTS, CLIENTS // 2):
        rows = torch.arange(clients * 40).view(clients, -1)
        data = Padded(rows, samples.y[rows], torch.full((clients,), 40))
        models, key = network.initial(Key(0)).expand(clients, -1), Key(0).fold(torch.arange(clients))
        step = traced(
            stack_of(network, models, samples, data, key, Recipe(steps=2)), clients, Plan("compiled-vmap")
        )
        assert step is not None
        jobs.append((step, cpu))
    marks["traced"] = time.perf_counter() - begun
    compile_ahead([(*job, "fp32") for job in jobs])
    for name, (step, device) in zip(("one program", "two programs"), jobs, strict=True):
        compiled_code.compiled(step, device, "fp32")
        marks[name] = time.perf_counter() - begun
    return marks


def in_a_process(given: list[str], cache: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--once", *given]
    done = subprocess.run(
        command, env={**os.environ, "HOLDFAST_CACHE": cache}, stdout=subprocess.PIPE, text=True, check=True
    )
    marks: dict[str, float] = json.loads(done.stdout)
    return marks


def measure(work: dict[str, list[str]], turns: int) -> list[dict[str, Any]]:
    rows = []
    for plan, given in work.items():
        with tempfile.TemporaryDirectory() as cache:
            first = in_a_process(given, cache)
            again = [in_a_process(given, cache) for _ in range(turns)]
        middle = {stage: statistics.median(marks[stage] for marks in again) for stage in first}
        rows += [{"plan": plan, "start": "first", **first}, {"plan": plan, "start": "second", **middle}]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--plan", nargs="+", default=["loop", "auto"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of the run, of which one is run")
    parser.add_argument("--compile", action="store_true", help="only make and find compiled code, on the CPU")
    parser.add_argument("--turns", type=int, default=3, help="second starts of each plan")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.once:
        one = (chosen.data, chosen.plan[0], chosen.device, chosen.rounds)
        print(json.dumps(compile_once() if chosen.compile else start_once(*one)))
        return
    settings = ["--data", chosen.data, "--device", chosen.device, "--rounds", str(chosen.rounds)]
    work = {"compile": ["--compile"]} if chosen.compile else {}
    work = work or {plan: [*settings, "--plan", plan] for plan in chosen.plan}
    rows = measure(work, chosen.turns)
    if chosen.json:
        print(json.dumps(rows, indent=1))
        return
    stages = [key for key in rows[0] if key not in ("plan", "start")]
    what = "the code of its step on a CPU" if chosen.compile else f"{chosen.data}, {chosen.device}, fedavg"
    print(f"fedcap-cnn, {CLIENTS} clients, {what}: seconds after torch is imported until")
    print(f"{'plan':14}{'start':8}" + "".join(f"{stage:>13}" for stage in stages))
    for row in rows:
        print(f"{row['plan']:14}{row['start']:8}" + "".join(f"{row[stage]:13.2f}" for stage in stages))


if __name__ == "__main__":
    main()
