"""More rounds for a run that was begun with fewer: it becomes the run that had them from the start.

Rounds depend on the seed and the round, never on how many rounds there are, with two exceptions: a method may
train once more after its last round, and a schedule may stretch over all rounds. Both are refused here."""

from __future__ import annotations

import datetime
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.experiment.config import Config
from holdfast.storage.store import Store


def whole_rounds(rounds: Any) -> int | None:
    """The number of rounds that a Python caller gave, or None; anything but a whole number is an error."""
    if rounds is None:
        return None
    try:
        return operator.index(rounds)
    except TypeError:
        raise ConfigError(f"rounds: needs a whole number, such as 100, not {rounds!r}") from None


def with_rounds(config: Config, rounds: int) -> Config:
    """The same experiment with another number of rounds."""
    return config.model_copy(update={"train": config.train.model_copy(update={"rounds": rounds})})


def check_extension(out: Path, config: Config, rounds: int) -> None:
    """Refuse a number of rounds that the run in this directory cannot have. `config` is what it has now."""
    before, done = config.train.rounds, Store(out).round() or 0
    if rounds < before:
        raise ConfigError(
            f"rounds: {out} was begun with {before} rounds, and rounds cannot be taken away; give {before} or"
            f" more, not {rounds}"
        )
    parts = config.parts()
    new = f"begin a new run with train.rounds = {rounds}"
    if rounds > before and done > before:
        raise ConfigError(
            f"rounds: {out} is at its end, where '{parts.method.name}' trains once more after the last round;"
            f" it cannot be extended; {new}"
        )
    schedule = parts.schedule
    if schedule is not None and any(
        schedule.of_round(round, before) != schedule.of_round(round, rounds) for round in range(1, done + 1)
    ):
        raise ConfigError(
            f"rounds: the schedule '{schedule.name}' stretches over all rounds, so with {rounds} of them the"
            f" first {done} would have had other learning rates; {new}"
        )


def extend(store: Store, manifest: Mapping[str, Any], rounds: int) -> None:
    """Give a run that is locked more rounds, unless it has them. The result goes first: if the process is
    killed in between, the run is one that has not finished."""
    before = manifest["config"]["train"]["rounds"]
    if rounds <= before:
        return
    (store.path / "result.json").unlink(missing_ok=True)
    config = {**manifest["config"], "train": {**manifest["config"]["train"], "rounds": rounds}}
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    change = {"from": before, "to": rounds, "after": store.round(), "time": when}
    store.write_json(
        "manifest.json", {**manifest, "config": config, "extended": [*manifest.get("extended", []), change]}
    )
