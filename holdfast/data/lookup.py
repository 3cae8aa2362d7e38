"""Which folder a dataset lies in: data.dir first, then the environment's HOLDFAST_DATA."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.core.errors import DataError

ENVIRONMENT = "HOLDFAST_DATA"


def find_folder(name: str, dir: Path | None, needed: tuple[str, ...] = ("train.parquet", "test.parquet")) -> Path:
    """The first folder of that name, written with - or _, that has the files needed."""
    from_environment = os.environ.get(ENVIRONMENT)
    places = [place for place in (dir, Path(from_environment).expanduser() if from_environment else None) if place is not None]
    spellings = list(dict.fromkeys((name.replace("-", "_"), name.replace("_", "-"))))
    for place in places:
        for spelling in spellings:
            if all((place / spelling / file).is_file() for file in needed):
                return place / spelling
    raise DataError(
        f"data '{name}' not found: looked in data.dir ({dir or 'not set'}) and {ENVIRONMENT} ({from_environment or 'not set'}) "
        f"for {' and '.join(f'{spellings[0]}/{file}' for file in needed)}; point one of them at the folder that holds {spellings[0]}/"
    )
