"""What tests/engine/test_ranks.py runs in each of several processes: rules, wrappers, detectors and methods
on ranks that torch.distributed joins. Every rank prints a line for each of them, with a digest of all bits.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python -m tests.engine.gloo_ranks FOLDER"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.core.registry import build
from holdfast.engine.ranks import here
from holdfast.engine.simulator import Simulator
from holdfast.experiment.runner import RunCallbacks
from holdfast.experiment.session import start_run
from tests.checks.aggregator_cases import EVERY_WAY
from tests.checks.test_columns import bits, judged, rounds
from tests.helpers import built_in, tiny

METHODS = ("fedavg", "ditto", "fedcap", "fedas", "c-pfl", "fedcom")
WIDTH = 300


def digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for value in tensors:
        found.update(f"{value.dtype} {tuple(value.shape)}".encode())
        found.update(value.contiguous().numpy().tobytes())
    return found.hexdigest()[:24]


def say(*words: object) -> None:
    print(*words, flush=True)


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ranks: Any = here()
    for case in EVERY_WAY:
        settings: dict[str, Any] = case.values[0]
        rule = build("aggregator", {"f": 2, **settings})
        found = rounds(rule, WIDTH, torch.float64, ranks)
        say("rule", str(settings).replace(" ", ""), digest(part for one in found for part in bits(one)))
    for name in built_in("wrapper"):
        more = {"p": 4} if name == "gas" else {}
        rule = build("wrapper", {"name": name, **more})(build("aggregator", {"name": "mean", "f": 2}))
        found = rounds(rule, WIDTH, torch.float64, ranks)
        say("wrapper", name, digest(part for one in found for part in bits(one)))
    for name in built_in("detector"):
        words = repr([str(one) for one in judged(name, WIDTH, torch.float64, ranks)])
        say("detector", name, hashlib.sha256(words.encode()).hexdigest()[:24])
    for name in METHODS:
        config = tiny(
            method=name,
            data={"clients": 7},
            engine={"plan": "loop", "threads": 1},
            train={"rounds": 2, "participation": 0.8},
            attack={"name": "lie", "knows": "everyone", "fraction": 0.3},
        )
        out = folder / name
        start_run("", config, out, RunCallbacks(), [], Simulator, ranks)
        state = sorted((out / "state").glob("*"))[-1]
        say("method", name, hashlib.sha256(state.read_bytes()).hexdigest()[:24])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
