"""TensorBoard: event files in the run's own folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.experiment.manifest import is_sweep
from holdfast.tracking.base import Figures, KnownRun, finals


class TensorBoard:
    def begin(self, config: Mapping[str, Any], folder: Path, label: str, known: KnownRun | None) -> str:
        from torch.utils.tensorboard import SummaryWriter

        target = folder / "tensorboard"
        # rounds beyond it, which a killed session wrote, are not shown twice
        after = None if known is None else known.round + 1
        self.writer = SummaryWriter(str(target), purge_step=after)
        if known is None:
            lines = "\n".join(
                f"    {key} = {json.dumps(value, default=str)}" for key, value in config.items()
            )
            self.writer.add_text("config", f"{label}\n\n{lines}", 0)
        self.last = 0 if known is None else known.round
        self.where = f"tensorboard --logdir {folder.parent if is_sweep(folder.parent) else folder}"
        return target.name

    def round(self, round: int, figures: Figures) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, round)
        self.writer.flush()
        self.last = round

    def end(self, final: Figures | None) -> None:
        for name, value in finals(final or {}).items():
            self.writer.add_scalar(name, value, self.last)
        self.writer.close()
