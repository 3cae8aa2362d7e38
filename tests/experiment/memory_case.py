"""An experiment whose memory is limited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.experiment.config import make_config
from holdfast.results.run import Run
from holdfast.sweeps.session import start


def run_case(
    out: Path, memory: str, plan: str = "vmap", dtype: str = "float64", method: str = "ditto", **sections: Any
) -> Run:
    start(
        [
            (
                "",
                make_config(
                    {
                        "method": method,
                        "model": {"name": "mlp", "hidden": 8},
                        "data": {
                            "clients": 7,
                            "partition": {"name": "dirichlet", "min_samples": 3, "samples_per_client": 20},
                        },
                        "train": {"rounds": 2, "local_epochs": 1, "batch_size": 5, "lr": 0.1, "dtype": dtype},
                        "engine": {"plan": plan, "threads": 1, "memory": memory},
                        **sections,
                    }
                ),
            )
        ],
        out,
    )
    return Run(out)
