"""Reading runs: the contract's figures, data frames, and models that are the ones that were measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import holdfast
from holdfast.core.errors import ConfigError, RunError
from holdfast.core.registry import register
from holdfast.detectors.base import Detector, Judgement
from holdfast.results.run import Run, load
from holdfast.storage.store import Store
from holdfast.sweeps.session import start
from tests.experiment.sessions import begin, config

CONTRACT = {
    "accuracy",
    "accuracy/global",
    "accuracy/customised",
    "accuracy/personal",
    "accuracy/pooled",
    "accuracy/best",
    "accuracy/better_of",
    "accuracy/tacc",
    "accuracy/tacc/pooled",
    "accuracy/last10",
    "accuracy/worst10",
    "accuracy/std",
    "rounds_to/0.80",
    "fallback_rounds",
    "attack/asr",
    "detection/dacc",
    "detection/fpr",
    "detection/fnr",
    "bytes/up",
    "bytes/down",
    "seconds/client",
    "seconds/server",
    "seconds/server/aggregate",
    "seconds/server/calibrate",
    "seconds/server/detect",
}


@pytest.fixture(scope="module")
def ditto(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("runs") / "ditto"
    begin(folder, train={"rounds": 3, "participation": 0.5, "lr": 0.1})
    return Run(folder)


@pytest.mark.parametrize("method", ["ditto", "fedavg", "local"])
def test_the_result_has_every_name_of_the_contract(tmp_path: Path, method: str) -> None:
    result = begin(tmp_path / "run", method=method)[0]
    assert set(result) >= {"run_dir", "rounds", "final", "protocol"}
    assert result["rounds"] == 2 and Path(result["run_dir"]) == tmp_path / "run"
    final = result["final"]
    assert CONTRACT <= set(final)
    assert (
        0 <= final["accuracy"] <= 1
        and final["accuracy"] == final[f"accuracy/{result['protocol']['deployed']}"]
    )
    assert (
        final["accuracy/customised"] is None
        and final["detection/dacc"] is None
        and final["attack/asr"] is None
    )
    assert all(isinstance(value, (int, float)) or value is None for value in final.values())
    assert Store(tmp_path / "run").read_json("result.json") == result
    protocol = result["protocol"]
    assert (
        protocol["clients"] == "all"
        and protocol["unselected"] == "keep_own"
        and set(protocol["models"]) <= {"global", "personal"}
    )


def test_a_run_that_was_never_measured_still_has_every_name(tmp_path: Path) -> None:
    """Nobody is available in the only round, and only the cohort is measured."""
    away = {str(client): [[9, 10]] for client in range(4)}
    final = begin(
        tmp_path / "run", train={"rounds": 1, "availability": away}, evaluate={"clients": "cohort"}
    )[0]["final"]
    assert (
        CONTRACT <= set(final)
        and final["accuracy"] is None
        and final["rounds_to/0.80"] is None
        and final["bytes/up"] == 0
    )


def test_bytes_are_exact(ditto: Run) -> None:
    size = sum(p.numel() for p in ditto.model().parameters()) * 4
    assert ditto.final["bytes/down"] == 3 * 2 * size and ditto.final["bytes/up"] == 3 * 2 * (
        size + 8
    )  # and a count and a loss


def test_seconds_of_detectors_and_aggregators(tmp_path: Path, forget: None) -> None:
    @register("detector", "slow-of-test")
    class Slow(Detector):
        """Takes its time and bans client 0."""

        def judge(self, state: Any, ctx: Any, models: Any, ids: Any) -> Any:
            import time

            yield from ()
            time.sleep(0.02)
            return Judgement(
                state, {0: "slow"} if bool((ids == 0).any()) else {}, {"length": models.norm(dim=1)}
            )

    final = begin(tmp_path / "run", method="fedavg", detectors=["slow-of-test"])[0]["final"]
    assert 0.04 <= final["seconds/server/detect"] <= final["seconds/server"]
    assert 0 < final["seconds/server/aggregate"] < final["seconds/server"]
    run = Run(tmp_path / "run")
    assert run.metrics["seconds/server/detect"].min() >= 0.02
    assert run.store.arrays(1)["verdict/scores/slow-of-test/length"].shape == (4,)
    # a ban in the last round does not change who was measured as what in it
    assert (
        run.clients()["selected"].tolist() == [False, True, True, True]
        and run.clients(1)["selected"].tolist() == [True] * 4
    )


def test_metrics_are_one_row_per_round(ditto: Run) -> None:
    frame = ditto.metrics
    assert frame["round"].tolist() == [1, 2, 3] and {
        "accuracy",
        "loss/train",
        "seconds/client",
        "bytes/up",
    } <= set(frame.columns)
    assert frame["accuracy"].iloc[-1] == ditto.final["accuracy"] and frame["cohort"].tolist() == [2, 2, 2]


def test_clients_are_one_row_each(ditto: Run) -> None:
    frame = ditto.clients()
    assert (
        frame["client"].tolist() == [0, 1, 2, 3]
        and frame["selected"].sum() == 2
        and frame["samples"].tolist() == [5] * 4
    )
    assert frame["accuracy/personal"].mean() == pytest.approx(ditto.final["accuracy"])
    assert ditto.clients(1)["accuracy/global"].mean() == pytest.approx(
        ditto.metrics["accuracy/global"].iloc[0]
    )
    with pytest.raises(ConfigError, match="round 99 was not evaluated"):
        ditto.clients(99)


def measured(run: Run, client: int, model: nn.Module) -> float:
    """Right answers on the client's own test samples, by plain PyTorch."""
    federation = run._experiment.federation
    rows, labels = federation.test.client(client)
    with torch.no_grad():
        return float((model(federation.samples.batch(rows)).argmax(-1) == labels).double().mean())


@pytest.mark.parametrize("unselected", ["keep_own", "deliver", "finetune"])
@pytest.mark.parametrize("method", ["ditto", "fedavg-ft", "fedavg"])
def test_the_models_are_those_that_were_measured(tmp_path: Path, method: str, unselected: str) -> None:
    """Also of clients outside the last cohort, for every way of treating them."""
    begin(
        tmp_path / "run",
        method=method,
        train={"rounds": 3, "participation": 0.5, "lr": 0.2, "local_epochs": 2},
        data={"partition": {"name": "iid", "samples_per_client": 60}},
        evaluate={"unselected": unselected},
    )
    run = Run(tmp_path / "run")
    for row in run.clients().to_dict("records"):
        for name in run._experiment.models:
            model = run.model(client=row["client"], model=name)
            assert not model.training and measured(run, row["client"], model) == pytest.approx(
                row[f"accuracy/{name}"], abs=1e-12
            )
        deployed = run._experiment.method.deploys
        assert torch.equal(run.vector(row["client"]), run.vector(row["client"], deployed))


def test_the_personal_model_is_the_private_row(ditto: Run) -> None:
    head = ditto.store.head()
    assert head is not None
    from holdfast.storage.client_state import RowStore

    rows = RowStore(ditto.path / "rows", head[1]["rows/index"])
    for client in sorted(rows.place):
        assert torch.equal(ditto.vector(client), rows.read(torch.tensor([client]))["personal"][0])
    assert torch.equal(ditto.vector(), ditto.state()["model"]) and torch.equal(
        ditto.vector(2, "global"), ditto.vector()
    )


def test_models_are_separate_objects(ditto: Run) -> None:
    first, second = ditto.model(client=0), ditto.model(client=1)
    before = [p.clone() for p in first.parameters()]
    with torch.no_grad():
        for p in second.parameters():
            p.zero_()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), before, strict=True))


def test_models_that_are_not_there(ditto: Run, tmp_path: Path) -> None:
    for client in (-1, 4, 99):
        with pytest.raises(ConfigError, match="clients 0 to 3"):
            ditto.model(client=client)
    with pytest.raises(ConfigError, match="ditto has no customised model; it has global, personal"):
        ditto.model(client=1, model="customised")
    with pytest.raises(ConfigError, match="client None: the run has clients 0 to 3"):
        ditto.model(model="personal")
    begin(tmp_path / "run", method="local")
    with pytest.raises(ConfigError, match="local has no global model"):
        Run(tmp_path / "run").model()


def test_an_unfinished_run(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    run = Run(tmp_path / "run")
    with pytest.raises(RunError, match="has not finished; `holdfast resume"):
        run.final  # noqa: B018
    assert len(run.metrics) == 2
    (tmp_path / "run" / "head.json").unlink()
    assert run.round == 0 and run.metrics.empty
    for read in (run.state, run.model):
        with pytest.raises(RunError, match="no committed round yet"):
            read()


def test_a_damaged_part(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    run = Run(tmp_path / "run")
    (tmp_path / "run" / "parts" / "000002.json").write_text("{")
    (tmp_path / "run" / "parts" / "000002.safetensors").write_bytes(b"x")
    for read in (lambda: run.metrics, run.clients):
        with pytest.raises(RunError, match="000002"):
            read()


def test_load(tmp_path: Path) -> None:
    begin(tmp_path / "one")
    start([("a", config(seed=5)), ("b", config(method="fedavg"))], tmp_path / "sweep")
    frame = load(tmp_path / "*")
    assert isinstance(frame, pd.DataFrame) and len(frame) == 3 * 2
    assert (
        frame.groupby("run").size().tolist() == [2, 2, 2]
        and frame["method"].tolist() == ["ditto"] * 4 + ["fedavg"] * 2
    )
    assert frame["label"].tolist() == ["one", "one", "a", "a", "b", "b"] and frame[
        "seed"
    ].unique().tolist() == [0, 5]
    assert len(load(str(tmp_path / "sweep"))) == 4 and holdfast.load is load
    with pytest.raises(ConfigError, match="no runs match"):
        load(tmp_path / "nothing*")
    assert "ditto" in repr(Run(tmp_path / "one")) or "one" in repr(Run(tmp_path / "one"))
