from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
USERS = os.environ.get("HOLDFAST_DATA")  # which tests do not see unless they ask for real data


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or fills the user's cache."""
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def real_data() -> Path:
    """The folder with the complete datasets, where there is one."""
    for place in (USERS, REPOSITORY.parent / "shared" / "datasets"):
        if place and (Path(place) / "mnist" / "train.parquet").is_file():
            return Path(place)
    pytest.skip("no real datasets: set HOLDFAST_DATA to a folder with mnist/train.parquet")


@pytest.fixture
def real(real_data: Path) -> Callable[[str], Path]:
    """Skips where one of the datasets is not among them: real("imdb")."""

    def find(folder: str) -> Path:
        if not (real_data / folder / "train.parquet").is_file():
            pytest.skip(f"no real data: {folder}/train.parquet is not below the folder of real datasets")
        return real_data

    return find
