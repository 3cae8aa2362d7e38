"""Writes a run for other programs: config as TOML, metrics as CSV and Parquet, models as safetensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from holdfast.core.errors import ConfigError
from holdfast.core.files import plain_disk_errors, write_atomically, write_json
from holdfast.core.toml import to_toml
from holdfast.interactive.normalisation import Normalisation
from holdfast.report.rerun_config import without_defaults
from holdfast.results.run import Run
from holdfast.storage.store import write_tensors


def export_run(run: Run, folder: Path, clients: Sequence[int | str] | None) -> Path:
    """Write everything; a folder with other files in it is refused."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"export: {folder} is not an empty folder; choose another one")
    method = run.config.parts().method
    every = range(int(run.manifest["clients"])) if method.deploys != "global" else ()
    with plain_disk_errors(folder):
        (folder / "models").mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.toml", to_toml(without_defaults(run.manifest["config"])).encode())
    samples = run._experiment.federation.samples
    write_json(folder / "normalisation.json", Normalisation(run.config.data, samples, None).plain())
    metrics = run.metrics
    write_atomically(folder / "metrics.csv", metrics.to_csv(index=False).encode())
    write_atomically(folder / "metrics.parquet", metrics.to_parquet(index=False))
    if (result := run.store.result()) is not None:
        write_json(folder / "final.json", result["final"])
    if "evaluate/ids" in run.store.arrays(run.round):
        write_atomically(folder / "clients.csv", run.clients().to_csv(index=False).encode())
    if "global" in method.models:
        _write_model(folder / "models" / "global.safetensors", run.model())
    for client in every if clients is None else map(run.client_number, clients):
        _write_model(folder / "models" / f"{_title(run, client)}.safetensors", run.model(client=client))
    return folder


def _title(run: Run, client: int) -> str:
    """The name of a client's file: its number, and its name with what any disk takes."""
    name = re.sub(r"[^\w.-]+", "_", run.client_name(client), flags=re.ASCII).strip("._")[:60]
    return f"client-{client}-{name}" if run.client_names and name else f"client-{client}"


def _write_model(file: Path, module: nn.Module) -> None:
    write_tensors(file, module.state_dict())
