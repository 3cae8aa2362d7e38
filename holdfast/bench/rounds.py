"""Times whole rounds under several plans: both models of every client, the server, the evaluation and the
commit to disk."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.device import Precision
from holdfast.experiment.config import make_config
from holdfast.experiment.loop import Experiment
from holdfast.local.plan import PlanName


@dataclass(frozen=True)
class RoundWork:
    """An experiment whose rounds are timed."""

    name: str
    config: dict[str, Any]
    plans: tuple[tuple[PlanName, Precision, int], ...]
    """Plan, precision and number of rounds; the first round warms up."""
    device: str = "cuda"

    def rows(self) -> list[dict[str, Any]]:
        """Return the measurements; the first plan is the baseline of the ratios."""
        times: dict[str, float] = {}
        for name, precision, rounds in self.plans:
            times[f"{name} {precision}"] = min(self._rounds(name, precision, rounds)[1:])
        base, first = next(iter(times.items()))
        clients = self.config["data"]["clients"]
        return [
            {
                "work": self.name,
                "clients": clients,
                "plan": title,
                "seconds": taken,
                "ratio": first / taken,
                "against": base,
            }
            for title, taken in times.items()
        ]

    def _rounds(self, plan: str, precision: str, rounds: int) -> list[float]:
        """Return the seconds from commit to commit."""
        from holdfast.experiment.runner import RunCallbacks
        from holdfast.sweeps.session import start

        seen: dict[int, float] = {0: time.perf_counter()}

        def moved(experiment: Experiment) -> None:
            committed = max(0, experiment.run_context.round - (experiment.finished is None))
            seen.setdefault(committed, time.perf_counter())

        train = {**self.config["train"], "rounds": rounds}
        engine = {"device": self.device, "plan": plan, "precision": precision}
        with tempfile.TemporaryDirectory() as folder:
            start(
                [("", make_config({**self.config, "train": train, "engine": engine}))],
                Path(folder) / "run",
                RunCallbacks(moved=moved),
            )
        moments = [seen[round] for round in sorted(seen)]
        return [after - before for before, after in zip(moments, moments[1:], strict=False)]


_FEDCAP_ON_CIFAR = {
    "data": {
        "name": "synthetic",
        "options": {"shape": (3, 32, 32), "samples": 10_000},
        "clients": 20,
        "partition": {"name": "pathological", "classes_per_client": 2, "samples_per_client": 300},
    },
    "model": {"name": "fedcap-cnn"},
    "method": {"name": "ditto"},
    "train": {"local_epochs": 5, "batch_size": 10, "lr": 0.01},
}
ROUNDS = (
    RoundWork(
        "ditto-round",
        _FEDCAP_ON_CIFAR,
        (("loop", "tf32", 3), ("captured-vmap", "tf32", 6), ("compiled-vmap", "tf32", 10)),
    ),
)
