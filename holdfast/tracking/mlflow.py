"""MLflow: at MLFLOW_TRACKING_URI, by default in the working directory; the experiment is
MLFLOW_EXPERIMENT_NAME or "holdfast"."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.tracking.base import Figures, KnownRun, finals, harmless

# An unreachable server is given up within seconds, not minutes; and no telemetry is sent.
_MANNERS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
_MOST_PARAMS, _LONGEST = 100, 500  # in one batch; of a value


class MLflow:
    def begin(self, config: Mapping[str, Any], folder: Path, label: str, known: KnownRun | None) -> str:
        for name, value in _MANNERS.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow.entities import Metric, Param

        self.client, self.metric, self.last = (
            mlflow.MlflowClient(),
            Metric,
            0 if known is None else known.round,
        )
        if known is not None:
            self.run = known.id
            self.client.update_run(self.run, status="RUNNING")
        else:
            self.run = self.client.create_run(
                self._experiment(), run_name=label, tags={"holdfast.folder": folder.name}
            ).info.run_id
            params = [Param(key, _text(value)) for key, value in config.items()]
            for first in range(0, len(params), _MOST_PARAMS):
                self.client.log_batch(self.run, params=params[first : first + _MOST_PARAMS])
        self.where = f"run {self.run} in {harmless(str(mlflow.get_tracking_uri()))}"
        return str(self.run)

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "holdfast"
        found = self.client.get_experiment_by_name(name)
        return str(self.client.create_experiment(name) if found is None else found.experiment_id)

    def round(self, round: int, figures: Figures) -> None:
        now = int(1000 * time.time())
        self.last = round
        self.client.log_batch(
            self.run, metrics=[self.metric(_name(name), value, now, round) for name, value in figures.items()]
        )

    def end(self, final: Figures | None) -> None:
        if final is not None:
            self.round(self.last, finals(final))
        self.client.set_terminated(self.run, status="FINISHED" if final is not None else "KILLED")


def _name(name: str) -> str:
    """Return a name that MLflow accepts: letters, digits and a few signs."""
    return re.sub(r"[^\w\-./ ]", "_", name)


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:_LONGEST]
