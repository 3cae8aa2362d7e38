"""Remember on disk what trials of plans measured on a GPU, so that the next start of the same work takes the
same plan without a trial. On a CPU, where times depend on what else runs, every start measures.

An entry is found by everything that the times depend on; it holds numbers only, and one that is damaged or of
another version is measured again."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, get_args

import torch

from holdfast.core.device import Precision
from holdfast.core.errors import StoreError
from holdfast.core.files import write_json
from holdfast.core.reading import is_number, parse_json, read_whole
from holdfast.data.cache import cache_folder
from holdfast.local.compiled_code import Operations, machine
from holdfast.local.plan import PlanName

_FORMAT = 1  # raise this when trials measure something else
_LONGEST = 1e9  # microseconds of one step of one client
_MOST = 1 << 16  # bytes of an entry


@dataclass(frozen=True)
class Measured:
    """Microseconds of a client's step under each plan, and the plans that could not run."""

    times: Mapping[str, float]
    refused: tuple[str, ...] = ()
    when: str = ""
    place: Path | None = None
    """The file that holds this, where it was found in one."""

    @property
    def tried(self) -> set[str]:
        return {*self.times, *self.refused}

    def sentence(self) -> str:
        """Where the times come from, and how to measure them again."""
        return "" if self.place is None else f"measured on {self.when}; delete {self.place} to measure again"


@dataclass(frozen=True)
class Entry:
    """Where the times of one piece of work are kept."""

    about: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        operations: Operations,
        device: torch.device,
        precision: Precision,
        rows: int,
        groups: Sequence[int],
        names: Sequence[str],
    ) -> Entry:
        """The operations of the step stand for the network, the loss, the update, the batch size, the type of
        numbers, and the shape of the samples; a change of any changes them."""
        return cls(
            {
                "format": _FORMAT,
                "step": operations.digest,
                "precision": precision,
                "rows": rows,
                "groups": sorted(groups),
                "plans": list(names),
                "threads": torch.get_num_threads(),
                **machine(device),
            }
        )

    @property
    def place(self) -> Path | None:
        folder = cache_folder()
        name = hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()[:16]
        return folder and folder / "plans" / f"{name}.json"

    def read(self) -> Measured | None:
        """What was measured before; None where nothing was, or where the file is not as it was written."""
        place = self.place
        if place is None:
            return None
        try:
            content = parse_json(read_whole(place, _MOST))
            when = date.fromisoformat(content["when"]).isoformat()
            times, refused = content["times"], content["refused"]
            sound = (
                content["about"] == self.about
                and times
                and all(name in get_args(PlanName) for name in [*times, *refused])
                and all(is_number(time) and 0 < time < _LONGEST for time in times.values())
            )
        except Exception:  # damaged files can make JSON and its use raise anything
            return None
        return Measured(times, tuple(refused), when, place) if sound else None

    def write(self, measured: Measured) -> None:
        """Keep what was measured; where the folder cannot be written, the next start measures again."""
        place = self.place
        if place is None or not all(math.isfinite(time) for time in measured.times.values()):
            return
        with suppress(OSError, StoreError):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_json(
                place,
                {
                    "about": self.about,
                    "times": dict(measured.times),
                    "refused": sorted(measured.refused),
                    "when": date.today().isoformat(),
                },
            )
