"""Weights & Biases. Offline, in the run's own folder, unless the environment has WANDB_API_KEY or WANDB_MODE:
a forgotten login never sends data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.experiment.manifest import is_sweep
from holdfast.tracking.base import Figures, KnownRun, finals


class WeightsAndBiases:
    def begin(self, config: Mapping[str, Any], folder: Path, label: str, known: KnownRun | None) -> str:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # our errors are not reported to them
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "holdfast",
            name=label,
            group=folder.parent.name if is_sweep(folder.parent) else None,
            id=None if known is None else known.id,
            resume=None if known is None else "allow",
            dir=str(folder),
            config=dict(config),
            mode=mode,
            reinit="create_new",  # the cells of a sweep run at the same time
            settings=wandb.Settings(
                silent=True, console="off", disable_code=True, disable_git=True, init_timeout=30
            ),
        )
        kept = (
            f"{folder}/wandb, offline; `wandb sync {folder}/wandb/offline-run-*` uploads it,"
            " WANDB_MODE=online does so during the run"
        )
        self.where = str(self.run.url) if mode == "online" else kept
        return str(self.run.id)

    def round(self, round: int, figures: Figures) -> None:
        self.run.log(figures, step=round)

    def end(self, final: Figures | None) -> None:
        self.run.summary.update(finals(final or {}))
        self.run.finish(exit_code=0 if final is not None else 1)
