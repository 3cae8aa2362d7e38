"""Every real dataset with its network, by `fedavg` and `ditto`: images, sensor windows, texts and a table
alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import holdfast
from tests.helpers import built_in

SMALL = {"name": "dirichlet", "beta": 0.5, "samples_per_client": 150}
RUNS: dict[str, tuple[str, dict[str, Any], str | dict[str, Any]]] = {
    "mnist": (
        "mnist",
        {"clients": 8, "partition": {"name": "pathological", "samples_per_client": 150}},
        "fedcap-cnn",
    ),
    "fashion-mnist": (
        "fashion_mnist",
        {"clients": 10, "partition": {"name": "complementary-pairs", "samples_per_client": 150}},
        "lenet",
    ),
    "cifar10": ("cifar10", {"clients": 8, "partition": SMALL}, "cnn-512"),
    "cifar100": ("cifar100", {"clients": 8, "partition": SMALL, "options": {"labels": "coarse"}}, "cnn-512"),
    "tiny-imagenet": (
        "tiny_imagenet",
        {"clients": 3, "partition": {"name": "iid", "samples_per_client": 32}},
        {"name": "resnet18", "norm": "batch"},
    ),
    "uci-har": ("uci_har", {"partition": {"name": "by-user", "samples_per_client": 100}}, "fedcap-cnn"),
    "wisdm": (
        "wisdm_2019_phone_accel",
        {
            "partition": {"name": "by-user", "samples_per_client": 100},
            "options": {"folder": "wisdm_2019_phone_accel"},
        },
        "fedcap-cnn",
    ),
    "ag-news": ("ag_news", {"clients": 8, "partition": SMALL}, "text-mean"),
    "imdb": ("imdb", {"clients": 6, "partition": {"name": "quantity", "samples_per_client": 60}}, "text-cnn"),
    "table": (
        "wisdm_2019_phone_accel",
        {
            "partition": {"name": "by-user", "samples_per_client": 150},
            "options": {"folder": "wisdm_2019_phone_accel", "label": "activity", "user": "user"},
        },
        "mlp",
    ),
}


MINUTES = {
    "tiny-imagenet"
}  # decoding its images takes minutes; the other image datasets are in the slow tests


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in MINUTES else name for name in RUNS]
)
def test_three_rounds_on_the_real_files(
    name: str, real: Callable[[str], Path], tmp_path: Path, quick_disk: None
) -> None:
    folder, data, model = RUNS[name]
    where = real(folder)
    for method in ("fedavg", "ditto"):
        config = {
            "method": method,
            "model": model,
            "data": {"name": name, "dir": str(where), **data},
            "train": {"rounds": 3, "local_epochs": 2, "lr": 0.05},
            "engine": {"plan": "loop"},
        }
        run = holdfast.run(config, tmp_path / method)
        losses = run.metrics["loss/train"].tolist()
        assert run.round == 3 and all(math.isfinite(loss) for loss in losses)
        assert losses[-1] < losses[0]  # it learns
        assert (
            run.final["accuracy"] is not None
            and 0 <= run.final["accuracy"] <= 1
            and run.final["diverged"] is None
        )


KINDS: dict[str, dict[str, Any]] = {
    "cifar10": {"name": "cnn-bn", "channels": [4, 4], "hidden": 8},
    "uci-har": {"name": "mlp", "hidden": 8, "batch_norm": True},
    "ag-news": {"name": "text-mean", "rows": 64},
    "table": {"name": "mlp", "hidden": 8, "batch_norm": True},
}


def small_table(folder: Path) -> Path:
    """The real one has millions of rows: four people with 30 rows each of two numbers and a word."""
    rows = [
        {
            "a": float(i % 7),
            "b": i * 0.01,
            "c": "xyz"[i % 3],
            "who": i // 30,
            "label": "up" if i % 2 else "down",
        }
        for i in range(120)
    ]
    (folder / "small").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "small" / "train.parquet")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_method_on_every_kind_of_data(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, quick_disk: None
) -> None:
    """Images, windows, texts and tables, in float32."""
    folder, data, _ = RUNS[name]
    if name == "table":
        where, options = small_table(tmp_path), {"folder": "small", "label": "label", "user": "who"}
        data = {"partition": {"name": "by-user"}, "options": options}
    else:
        where = request.getfixturevalue("real")(folder)
    methods = [
        method for method in built_in("method") if not (method == "fedbn" and name == "ag-news")
    ]  # a network without BatchNorm
    config = {
        "model": KINDS[name],
        "train": {"rounds": 2, "local_steps": 2, "lr": 0.05, "participation": 0.5},
        "engine": {"plan": "vmap"},
        "data": {
            "name": name,
            "dir": str(where),
            **data,
            "partition": {**data["partition"], "samples_per_client": 20},
            "split": {"train": 0.6, "validation": 0.2, "test": 0.2},
        },
        "sweep": {"method.name": methods},
    }
    cells = holdfast.sweep(config, tmp_path / "sweep")
    assert [(cell.label, cell.status, cell.reason) for cell in cells] == [
        (method, "finished", None) for method in methods
    ]
    assert all(
        cell.final is not None and 0 <= cell.final["accuracy"] <= 1 and math.isfinite(cell.final["loss"])
        for cell in cells
    )


@pytest.mark.slow
def test_fedcoms_pairs_on_mnist_find_each_other(
    real: Callable[[str], Path], tmp_path: Path, quick_disk: None
) -> None:
    """The paper's setting with a fifth of the samples and twice the rate, so that it is over in seconds."""
    pairs = {"name": "complementary-pairs", "ratio": 0.95, "samples_per_client": 1000}
    run = holdfast.run(
        method="fedcom",
        model="lenet",
        data={"name": "mnist", "dir": str(real("mnist")), "clients": 10, "partition": pairs},
        train={"rounds": 2, "local_epochs": 1, "batch_size": 32, "lr": 0.002, "momentum": 0.9},
        engine={"plan": "loop"},
        out=tmp_path / "run",
    )
    assert run.final["matching/accuracy"] >= 0.9
