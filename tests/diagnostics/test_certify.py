"""The certificate of a finished run, in Python and on the command line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from holdfast.core.errors import ConfigError
from holdfast.diagnostics.certify import _wrapper, certify, clean_model, threat_of
from holdfast.results.run import Run
from tests.cli.commands import Answer, refused
from tests.helpers import run_all

CRFL: dict[str, Any] = {"name": "crfl", "start": 1.0, "growth": 0.1, "noise": 0.05}
TABLE: dict[str, Any] = {
    "data": {
        "name": "synthetic",
        "options": {"samples": 300, "shape": [1, 1, 2], "classes": 2, "separation": 4.0},
        "partition": {"name": "iid", "samples_per_client": 20},
        "clients": 5,
    },
    "model": {"name": "mlp", "hidden": []},
    "aggregator": {"name": "mean", "wrap": [CRFL]},
    "train": {"rounds": 3, "local_epochs": 2, "batch_size": 8, "lr": 0.1, "lr_decay": 0.5},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_all([TABLE], tmp_path_factory.mktemp("certify"))[0]


def test_the_model_that_is_smoothed_has_no_noise_yet(run: Run) -> None:
    """It is as long as round 3 allows; the run's own has the noise of that round."""
    model = clean_model(run, _wrapper(run))
    assert float(model.norm()) == pytest.approx(1.3, abs=1e-9) or float(model.norm()) < 1.3
    noise = run.vector() - model
    assert 0.01 < float(noise.std()) < 0.15


def test_votes_are_those_of_a_normal_margin(run: Run) -> None:
    """With two classes the margin of a sample x has the deviation sigma sqrt(2 (|x|^2 + 1))."""
    found = certify(run, draws=200, noise=0.3, samples=40)
    model = clean_model(run, _wrapper(run))
    weight, bias = model[:4].view(2, 2), model[4:]
    samples = run._experiment.federation.samples
    x = samples.batch(torch.tensor(found.votes["sample"].to_numpy()), torch.float64).flatten(1)
    margin = x @ (weight[0] - weight[1]) + bias[0] - bias[1]
    chance = 0.5 * (1 + torch.erf(margin / (0.3 * (2 * (x.square().sum(1) + 1)).sqrt()) / math.sqrt(2)))
    assert (found.votes["predicted"].to_numpy() == (chance < 0.5).numpy())[(chance - 0.5).abs() > 0.1].all()
    top = torch.maximum(chance, 1 - chance).numpy()
    assert (found.votes["lower"].to_numpy() <= top).all() and (found.votes["lower"] > top - 0.25).all()


def test_what_attackers_may_do(run: Run) -> None:
    """15 samples in batches of 8: 2 steps in each of 2 epochs, with the rate of the attacked round."""
    assert run._experiment.federation.train.counts.tolist() == [15] * 5
    threat = threat_of(run, _wrapper(run), 2, attacked=2, noise=0.2, lipschitz=3.0)
    assert threat.weights == [0.2, 0.2] and threat.steps == [4.0, 4.0] and threat.lr == pytest.approx(0.05)
    assert threat.noise == 0.05 and threat.later == [(pytest.approx(1.3), 0.2)]
    last = threat_of(run, _wrapper(run), 1, noise=0.2, scale=4.0, poisoned=0.5)
    assert (last.noise, last.later, last.scale, last.poisoned) == (0.2, [], 4.0, 0.5)
    samples, table = run._experiment.federation.samples, run._experiment.federation
    rows = torch.cat([table.train.row, table.test.row]).unique()
    longest = float(samples.batch(rows, torch.float64).flatten(1).norm(dim=1).max())
    rho, b = 1.3, math.hypot(longest, 1)
    assert last.lipschitz == pytest.approx(math.hypot(rho * b / 2 + math.sqrt(2), b))


def test_more_attackers_and_larger_radii_leave_less(run: Run) -> None:
    found = certify(run, attackers=(1, 3), draws=40)
    again = certify(run, attackers=(1, 3), draws=40)
    pd.testing.assert_frame_equal(found.votes, again.votes)  # nothing is left to chance
    one, three = found.votes["radius/1"], found.votes["radius/3"]
    assert np.allclose(one / 3, three, equal_nan=True) and one.notna().any()
    table = found.accuracy()
    for _, part in table.groupby("attackers"):
        assert len(part) == 10 and part["certified accuracy"].is_monotonic_decreasing
    assert (table["certified accuracy"] <= table["certified rate"]).all()
    right = found.votes["right"]
    assert found.smoothed == right.mean() and table["certified accuracy"][0] == (one.notna() & right).mean()
    fixed = found.accuracy([0.0, 1e9])
    assert fixed["radius"].tolist() == [0.0, 1e9] * 2 and fixed["certified rate"][1] == 0
    paper = certify(run, draws=40, bounds="hoeffding").votes
    assert (paper["lower"] < found.votes["lower"]).all()


def test_runs_that_the_theorem_is_not_about_are_refused(run: Run, simulate: Callable[..., Run]) -> None:
    for change, name in (
        ({"aggregator": "mean"}, "aggregator"),
        ({"aggregator": {"name": "median", "wrap": [CRFL]}}, "aggregator"),
        ({"method": "fedprox"}, "method"),
        ({"train": {**TABLE["train"], "rounds": 1, "momentum": 0.9}}, "train.momentum"),
    ):
        with pytest.raises(
            ConfigError, match=f"^{name}: .* cannot be certified; the theorem is about fedavg"
        ):
            certify(simulate(**{**TABLE, "train": {**TABLE["train"], "rounds": 1}, **change}))
    deep = simulate(**{**TABLE, "model": {"name": "mlp", "hidden": 4}})
    with pytest.raises(ConfigError, match="lipschitz: it is known for logistic regression only"):
        certify(deep, draws=2)
    assert certify(deep, draws=2, lipschitz=5.0).smoothed >= 0
    for wrong, name in (
        ({"attackers": [6]}, "attackers"),
        ({"attacked": 4}, "attacked"),
        ({"alpha": 2.0}, "alpha"),
        ({"draws": 0}, "draws"),
    ):
        with pytest.raises(ConfigError, match=f"^{name}: "):
            certify(run, **{"draws": 2, **wrong})


def test_the_command(run: Run, cli: Callable[..., Answer], tmp_path: Path) -> None:
    answer = cli("certify", run.path, "--draws", 10, "--attackers", 1, "--attackers", 2, "--radius", 0.001)
    assert answer.code == 0 and "60 test samples" in answer.out
    assert [line.split()[0] for line in answer.out.splitlines()[2:]] == ["1", "2"]
    file = tmp_path / "votes.csv"
    answer = cli("certify", run.path, "--draws", 10, "--json", "--out", file, "--hoeffding")
    said = json.loads(answer.out)
    assert said["certified"][0]["attackers"] == 1 and len(pd.read_csv(file)) == 60
    refused(cli("certify", run.path, "--out", "votes.txt"), "--out: votes.txt must end in .csv")


@pytest.mark.slow
def test_the_papers_claim_certified_accuracy_falls_with_radius_attackers_and_scale(tmp_path: Path) -> None:
    """Xie et al., Figures 2 to 5, on the digits with logistic regression: the smoothed prediction is about as
    good as the model, and with more attackers, a larger factor or less noise less of it is certified."""
    table = {
        "data": {"clients": 20, "partition": {"name": "iid", "samples_per_client": 60}},
        "model": {"name": "mlp", "hidden": []},
        "train": {"rounds": 20, "local_epochs": 1, "batch_size": 20, "lr": 0.05, "dtype": "float32"},
    }
    quiet, loud = run_all(
        [
            {**table, "aggregator": {"name": "mean", "wrap": [{**CRFL, "start": 2.0, "noise": noise}]}}
            for noise in (0.01, 0.03)
        ],
        tmp_path,
    )
    found = certify(loud, attackers=(1, 4), draws=200)
    assert found.smoothed > 0.8 and abs(found.smoothed - loud.final["accuracy"]) < 0.1
    largest = float(found.votes["radius/1"].max())
    few, many = (part for _, part in found.accuracy([0.0, largest / 4, largest / 2]).groupby("attackers"))
    assert few["certified accuracy"].iloc[0] > 0.6
    assert few["certified accuracy"].is_monotonic_decreasing
    assert many["certified accuracy"].iloc[1] < few["certified accuracy"].iloc[1]
    scaled = certify(loud, draws=200, scale=10.0).votes["radius/1"]
    assert np.allclose(scaled * 10, found.votes["radius/1"], equal_nan=True)
    assert certify(quiet, draws=200).votes["radius/1"].max() < largest
