"""Names of clients: in tables, among the attackers, in exported files; given, or of the data's users."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import holdfast
from holdfast.core.errors import ConfigError
from holdfast.diagnostics.recorded import diagnose

NAMES = ["Bonn", "Cork", "Gent/../Ost", "Kiel"]
SHORT = {
    "model": {"name": "mlp", "hidden": 4},
    "train": {"rounds": 1, "local_epochs": 1},
    "engine": {"plan": "loop", "threads": 1},
}


def samples(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(16, 3)).astype("float32"), np.arange(16) % 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> holdfast.Run:
    data = {name: samples(place) for place, name in enumerate(NAMES)}
    attack = {"name": "sign-flip", "clients": ["Kiel", 1]}
    return holdfast.run(
        SHORT,
        data=data,
        method="fedcap",
        attack=attack,
        train={"rounds": 2},
        out=tmp_path_factory.mktemp("n") / "run",
    )


def test_attackers_are_named(run: holdfast.Run) -> None:
    assert run.malicious() == [1, 3] and run.malicious_names() == ["Cork", "Kiel"]
    with pytest.raises(ConfigError, match="attack.clients: there is no client 'Kjel'; did you mean 'Kiel'"):
        holdfast.run(run.config, attack={"name": "sign-flip", "clients": ["Kjel"]}, out=run.path.parent / "x")
    with pytest.raises(ConfigError, match="there is no client 'Kiel'; the clients have no names"):
        holdfast.run(
            SHORT,
            data={"clients": 4},
            attack={"name": "sign-flip", "clients": ["Kiel"]},
            out=run.path.parent / "x",
        )


def test_tables_have_a_column_of_names(run: holdfast.Run) -> None:
    frame = run.table("norms")
    assert list(frame.columns[:3]) == ["round", "client", "name"]
    assert set(zip(frame["client"], frame["name"], strict=True)) <= set(enumerate(NAMES))
    pairs = run.table("customisation")
    assert (pairs["other_name"] == [NAMES[other] for other in pairs["other"]]).all()
    assert diagnose(run, "norms").frame.equals(frame) and len(pairs)
    assert diagnose(run, "customisation").figures


def test_exported_models_have_the_names_in_their_files(run: holdfast.Run, tmp_path: Path) -> None:
    run.export(tmp_path / "all", clients=["Bonn", 2])
    files = sorted(file.name for file in (tmp_path / "all" / "models").glob("client*"))
    assert files == ["client-0-Bonn.safetensors", "client-2-Gent_.._Ost.safetensors"]


def test_users_of_a_table_name_their_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    frames = []
    for place, name in enumerate(["York", "Bonn", "Cork"]):
        x, y = samples(place)
        frames.append(pd.DataFrame(x, columns=["a", "b", "c"]).assign(label=y, hospital=name))
    (tmp_path / "wards").mkdir()
    pd.concat(frames).to_parquet(tmp_path / "wards" / "train.parquet", index=False)
    data = {
        "name": "table",
        "options": {"folder": str(tmp_path / "wards"), "user": "hospital"},
        "partition": "by-user",
    }
    run = holdfast.run(
        SHORT,
        data=data,
        method="ditto",
        attack={"name": "sign-flip", "clients": ["York"]},
        out=tmp_path / "run",
    )
    assert run.clients()["name"].tolist() == ["Bonn", "Cork", "York"] and run.malicious() == [2]
    assert run.manifest["client_names"] == ["Bonn", "Cork", "York"]
    assert holdfast.open(run.path).client_names == ("Bonn", "Cork", "York")
