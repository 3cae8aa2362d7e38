"""A round of a detector by hand: models around a reference, without a run."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.core.flat import Layout, Wire
from holdfast.core.keys import Key
from holdfast.core.together import alone
from holdfast.core.types import State
from holdfast.detectors.base import Detector, Judgement
from holdfast.results.run import Run


def judged(
    detector: Detector,
    updates: Sequence[Sequence[float]] | Tensor,
    reference: Sequence[float] | Tensor | None = None,
    state: State | None = None,
    ids: Sequence[int] | None = None,
    layout: Layout | None = None,
    probe: Any = None,
) -> Judgement:
    x = torch.as_tensor(updates, dtype=torch.float64)
    d = x.shape[1]
    start = torch.zeros(d, dtype=torch.float64)
    start = start if reference is None else torch.as_tensor(reference, dtype=torch.float64)
    layout = layout or Layout.of(nn.Linear(d, 1, bias=False))
    ctx = SimpleNamespace(
        reference=start,
        layout=layout,
        wire=Wire.of(layout, torch.ones(d, dtype=torch.bool)),
        key=Key(1),
        probe=probe,
    )
    whose = torch.arange(len(x)) if ids is None else torch.tensor(ids)
    found: Judgement = alone(
        detector.judge(detector.init() if state is None else state, ctx, start + x, whose)
    )
    return found


BACKDOOR = {"name": "backdoor", "size": 2, "fraction": 0.2, "ratio": 0.5}
IID = {"name": "iid", "samples_per_client": 60}
SKEWED = {"name": "dirichlet", "beta": 0.5, "samples_per_client": 60}


def play(partition: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """15 rounds of digits with 20 clients, for a claim of a paper at small scale: a second or two."""
    train = {"rounds": 15, "local_epochs": 2, "lr": 0.1, "batch_size": 10, "dtype": "float32"}
    return {
        "data": {"clients": 20, "partition": partition},
        "model": {"name": "mlp", "hidden": 32},
        "train": train,
        "evaluate": {"every": 15},
        **sections,
    }


def excluded(run: Run) -> tuple[float, float]:
    """The shares of attackers' and of honest clients' models, over all rounds, that detectors rejected or
    whose clients they banned."""
    found, bad = {True: [0, 0], False: [0, 0]}, set(run.malicious())
    for part in run.store.parts(run.round):
        gone = {int(client) for client in (*part["rejected"], *part["banned"])}
        for client in run.store.arrays(part["round"])["verdict/ids"].tolist():
            found[client in bad][client in gone] += 1
    attackers, honest = (out / max(1, kept + out) for kept, out in (found[True], found[False]))
    return attackers, honest
