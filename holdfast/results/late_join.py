"""Clients that join after training (FedCAP, appendix A): their data, from files or a config, as one more
client of a run's federation.

The samples of a new client must mean what the run's samples mean: they are normalised by the run's mean and
deviation, and their classes are numbered as in the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from holdfast.attacks.adversary import Adversary
from holdfast.core.errors import ConfigError, DataError, suggest
from holdfast.core.flat import Layout
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.data.federation import ClientRows, Samples, build_federation
from holdfast.data.sources.base import FolderSource
from holdfast.data.sources.table import TableSource
from holdfast.engine.run_context import RunContext
from holdfast.evaluation.evaluate import score
from holdfast.experiment.config import make_config
from holdfast.experiment.config_tables import read_config
from holdfast.local.plan import Plan

if TYPE_CHECKING:
    from holdfast.results.run import Run


@dataclass(frozen=True)
class NewClient:
    """A client that joins after training: samples that are not in the run, and which rows of them are for
    training and for testing."""

    samples: Samples
    train: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class JoinResult:
    """The model of a late joiner [size], and its accuracy and that of the global model on the joiner's own
    test samples (None if it has no samples)."""

    model: Tensor
    samples: int
    tested: int
    accuracy: float | None
    of_global: float | None


def join(run: Run, new_client: NewClient) -> JoinResult:
    """Train the new client's update as the run's clients train, and customise its model from the pools."""
    state, experiment = run.pooled(), run._experiment
    client = experiment.federation.clients  # the number after the last
    run_context = _context_with(experiment.run_context, new_client)
    return _measured(
        run, run_context, client, run._of_client(run.round, state, client, "customised", run_context)
    )


def join_again(run: Run, client: int) -> JoinResult:
    """Do the same for a client of the run's own federation, for example one that was held out."""
    run.pooled()
    return _measured(run, run._experiment.run_context, client, run.vector(client, "customised"))


def _context_with(run_context: RunContext, new_client: NewClient) -> RunContext:
    """Return the experiment with one more client, which is benign; the others have no samples."""
    before = [np.zeros(0, dtype=np.int64)] * run_context.federation.clients
    tables = {"train": new_client.train, "validation": before[0], "test": new_client.test}
    held = {
        name: ClientRows.from_lists([*before, rows], new_client.samples.y) for name, rows in tables.items()
    }
    federation = replace(run_context.federation, samples=new_client.samples, **held)  # type: ignore[arg-type]
    return replace(
        run_context,
        federation=federation,
        adversary=Adversary(None, torch.zeros(0, dtype=torch.int64), run_context.key),
    )


def _measured(run: Run, run_context: RunContext, client: int, model: Tensor) -> JoinResult:
    ids, plan = torch.tensor([client]), Plan(**run.manifest["plan"])
    test = run_context.federation.test.take(ids)

    def accuracy(vector: Tensor) -> float | None:
        found = score(
            run_context.network,
            run_context.rule.predict,
            vector[None],
            torch.tensor([0]),
            run_context.federation.samples,
            test,
            plan,
        )
        return float(found.correct[0]) / float(found.total[0]) if int(found.total[0]) else None

    samples = int(run_context.federation.train.counts[client])
    return JoinResult(model, samples, int(test.count[0]), accuracy(model), accuracy(run.vector()))


# ---- the data of a new client


_FITTED = (
    "--data: a table's columns are fitted to the run's own train split, which other files do not know; "
    "hold clients out with data.held_out, and name one with --client"
)


def from_folder(run: Run, folder: Path) -> NewClient:
    """Read Parquet files with the run's own source; all training rows belong to the new client."""
    settings = run.config.data
    source = settings.source()
    if not isinstance(source, FolderSource):
        raise DataError(
            f"--data: the run's data '{settings.name}' is not read from files; give a config, or name a"
            " client with --client"
        )
    if isinstance(source, TableSource):
        raise DataError(_FITTED)
    there = build(
        "source",
        {**source.settings(), "name": settings.name, "folder": str(folder.absolute())},
        "data.options",
    )
    samples = _as_run_samples(run._experiment.federation.samples, there.load(None), str(folder))
    return NewClient(samples, np.arange(samples.train_rows), np.arange(samples.train_rows, len(samples)))


def from_config(run: Run, file: Path, client: int | None) -> NewClient:
    """Read one client of the federation that a config's [data] section and seed describe."""
    config = make_config(
        {name: value for name, value in read_config(file).items() if name in ("seed", "data")}
    )
    files, own = ((data.name, data.options, data.dir) for data in (config.data, run.config.data))
    if isinstance(config.data.source(), TableSource) and files != own:
        raise DataError(_FITTED)
    federation = build_federation(config.data, Key(config.seed).fold("data"))
    if client is None and federation.clients > 1:
        raise ConfigError(
            f"--client: {file} describes {federation.clients} clients, from 0; give the number of the one"
            " that joins"
        )
    if not 0 <= (client or 0) < federation.clients:
        raise ConfigError(f"--client: {file} describes clients 0 to {federation.clients - 1}, got {client}")
    samples = _as_run_samples(run._experiment.federation.samples, federation.samples, str(file))
    train, test = (table.client(client or 0)[0].numpy() for table in (federation.train, federation.test))
    return NewClient(samples, train, test)


def _as_run_samples(run: Samples, new: Samples, where: str) -> Samples:
    """Return the new client's samples as the run's models read them."""
    if (new.sample_shape, new.x.dtype) != (run.sample_shape, run.x.dtype):
        raise DataError(
            f"{where}: samples of shape {new.sample_shape} ({_word(new)}), the run's have {run.sample_shape}"
            f" ({_word(run)})"
        )
    y = new.y
    if new.class_names and run.class_names:
        strange = [name for name in new.class_names if name not in run.class_names]
        if strange:
            raise DataError(
                f"{where}: the run has no class '{strange[0]}'{suggest(strange[0], run.class_names)}"
            )
        y = torch.tensor([run.class_names.index(name) for name in new.class_names])[y]
    elif new.class_names:  # numbered by their own order, which need not be that of the run's numbers
        raise DataError(
            f"{where}: classes have names, such as '{new.class_names[0]}', the run's are numbers; label with"
            " these numbers"
        )
    elif int(y.max()) >= run.classes:
        raise DataError(f"{where}: label {int(y.max())}, the run has classes 0 to {run.classes - 1}")
    return replace(new, y=y, classes=run.classes, class_names=run.class_names, mean=run.mean, std=run.std)


def _word(samples: Samples) -> str:
    return str(samples.x.dtype).removeprefix("torch.")


# ---- a new client that has trained elsewhere


def parameters_of(update: Tensor | Mapping[str, Tensor], layout: Layout, where: str) -> Tensor:
    """Return a change of a model as one vector of its parameters, without buffers."""
    if isinstance(update, Tensor):
        if update.shape != (layout.parameters,):
            raise ConfigError(
                f"{where}: the update has shape {tuple(update.shape)}, the model has {layout.parameters}"
                " parameters"
            )
        return update.detach().cpu()
    slots = [slot for slot in layout.slots if not slot.buffer]
    missing = [slot.name for slot in slots if slot.name not in update]
    if missing:
        raise ConfigError(f"{where}: the update has no '{missing[0]}'")
    strange = [name for name in update if name not in {slot.name for slot in layout.slots}]
    if strange:
        raise ConfigError(
            f"{where}: the model has no '{strange[0]}'{suggest(strange[0], [slot.name for slot in slots])}"
        )
    for slot in slots:
        if tuple(update[slot.name].shape) != slot.shape:
            raise ConfigError(
                f"{where}: '{slot.name}' has shape {tuple(update[slot.name].shape)}, the model's is"
                f" {slot.shape}"
            )
    return torch.cat([update[slot.name].detach().cpu().reshape(-1) for slot in slots])
