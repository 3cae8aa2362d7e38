"""One claim of each backdoor paper, played on the digits with ten clients; where a claim does not hold so,
the test says how it is. Figures are of seeds 0 (and 1, 2), 20 rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.results.run import Run

pytestmark = pytest.mark.slow
Play = Callable[..., dict[str, Run]]


@pytest.fixture
def play(simulate_all: Callable[..., list[Run]]) -> Play:
    """Runs by the names of their attacks."""

    def go(attacks: dict[str, dict[str, Any]], **sections: Any) -> dict[str, Run]:
        usual: dict[str, Any] = {
            "data": {"clients": 10, "partition": {"name": "dirichlet", "beta": 1.0}},
            "model": {"name": "mlp", "hidden": 32},
            "train": {"rounds": 20, "local_epochs": 2, "batch_size": 20, "lr": 0.1, "dtype": "float32"},
            "evaluate": {"every": 5},
            **sections,
        }
        tables = []
        for attack in attacks.values():
            given = dict(attack)
            more = {name: given.pop(name) for name in ("seed", "aggregator") if name in given}
            tables.append({**usual, **more, "attack": given})
        return dict(zip(attacks, simulate_all(tables), strict=True))

    return go


def asr(run: Run, model: str = "global") -> float:
    found = run.final[f"attack/asr/{model}"]
    assert found is not None
    return float(found)


def test_a_trigger_in_parts_succeeds_more_than_one_attacker_with_all_of_it(play: Play) -> None:
    """DBA, Sec. 4.2: with as many poisoned pixels in all, four attackers with a part each are earlier and
    more successful than one with the whole trigger. Here 1.00 against 0.92 in the end, 0.97 against 0.73 on
    average. Four attackers with the whole trigger, which poison four times as much, are no worse than
    DBA."""
    bars = {"trigger": {"name": "bars", "width": 2, "gap": 1}, "ratio": 0.3}
    runs = play(
        {
            "dba": {"name": "dba", "clients": [0, 1, 2, 3], **bars},
            "one": {"name": "backdoor", "clients": [0], **bars},
            "four": {"name": "backdoor", "clients": [0, 1, 2, 3], **bars},
        }
    )
    means = {name: float(run.final["attack/asr/last10"] or 0) for name, run in runs.items()}
    assert asr(runs["dba"]) > asr(runs["one"]) and means["dba"] > means["one"] + 0.1
    assert means["four"] >= means["dba"]
    assert all((run.final["accuracy"] or 0) > 0.9 for run in runs.values())


def test_clipping_does_not_stop_rare_samples(play: Play) -> None:
    """Wang et al.: norm bounds hardly weaken an edge-case backdoor, since its updates are not long.
    Here it is 0.21 and 0.42 with and without clipping to the median norm, 0 without an attack; but sevens
    are few, so that it costs 2 points of accuracy (the paper: nearly none), and the success is far below
    the paper's."""
    edge = {"name": "edge-case", "fraction": 0.3, "tail": 0.3, "source": 7}
    clip = {"aggregator": {"name": "mean", "wrap": ["clip"]}}
    attacks = {
        f"{name} {seed}": {**edge, "seed": seed, **more}
        for seed in (0, 1)
        for name, more in {"plain": {}, "clipped": clip, "honest": {"ratio": 0.0}}.items()
    }
    runs = play(attacks)
    for seed in (0, 1):
        plain, clipped, honest = (runs[f"{name} {seed}"] for name in ("plain", "clipped", "honest"))
        assert asr(honest) == 0 and asr(plain) > 0.1 and asr(clipped) > 0.1
        assert abs(asr(plain) - asr(clipped)) < 0.2
        lost = float(honest.final["accuracy"] or 0) - float(plain.final["accuracy"] or 0)
        assert 0 < lost < 0.04


def test_an_adapted_trigger_succeeds_more_than_a_fixed_one_and_by_the_model(play: Play) -> None:
    """A3FL: its trigger is embedded better than a fixed one at the same place. Here 0.75 against
    0.22; and it is the poisoned model that answers so: without poisoned batches the same search reaches
    0.01."""
    a3fl = {"name": "a3fl", "fraction": 0.2}
    fixed = {"name": "patch", "size": 2, "place": "top-left", "colour": [0.5]}
    runs = play(
        {
            "a3fl": a3fl,
            "fixed": {"name": "backdoor", "fraction": 0.2, "trigger": fixed, "ratio": 0.25},
            "unpoisoned": {**a3fl, "ratio": 0.0},
        }
    )
    assert asr(runs["a3fl"]) > asr(runs["fixed"]) + 0.3 and asr(runs["unpoisoned"]) < 0.05
    assert (
        abs(float(runs["a3fl"].final["accuracy"] or 0) - float(runs["fixed"].final["accuracy"] or 0)) < 0.02
    )


@pytest.mark.parametrize("method", ["fedavg-ft", "fedrep"])
def test_an_aligned_trigger_outlives_personalisation(method: str, play: Play) -> None:
    """PFedBA: after fine-tuning on clean data the backdoor is still there, where that of a fixed
    trigger is not. Here on personal models 0.90 against 0.06 (fedavg-ft) and 0.55 against 0.03 (fedrep).
    Most of it is the trigger, not the model: without poisoned batches it reaches 0.70 and 0.41, which the
    paper does not measure."""
    pfedba = {"name": "pfedba", "fraction": 0.2}
    fixed = {"name": "patch", "size": 4, "place": "centre", "colour": [0.5]}
    runs = play(
        {
            "pfedba": pfedba,
            "fixed": {"name": "backdoor", "fraction": 0.2, "trigger": fixed, "ratio": 0.25},
            "unpoisoned": {**pfedba, "ratio": 0.0},
        },
        method=method,
    )
    aligned, plain, trigger = (asr(runs[name], "personal") for name in ("pfedba", "fixed", "unpoisoned"))
    assert aligned > plain + 0.4 and plain < 0.1
    assert 0.5 * aligned < trigger < aligned


@pytest.mark.parametrize("method", ["fedavg-ft", "fedrep"])
def test_natural_features_outlive_personalisation_if_they_may_be_seen(method: str, play: Play) -> None:
    """Bad-PFL: more than 0.8 on personal models with changes of 4/255 that nobody sees. On digits
    of 8 x 8 and a small network that is not so: 0.05 at three times that, 0.5 at thirteen times
    (fedavg-ft). It is still more than a pattern blended in, which personal models forget (0.01), and more
    than half of it is the trigger, not the model: without poisoned batches it reaches 0.30."""
    bad = {"name": "bad-pfl", "fraction": 0.2, "eps": 0.2}
    blended = {"name": "blended", "alpha": 0.2}
    runs = play(
        {
            "seen": bad,
            "hardly": {**bad, "eps": 0.05},
            "blended": {"name": "backdoor", "fraction": 0.2, "trigger": blended, "ratio": 0.2},
            "unpoisoned": {**bad, "ratio": 0.0},
        },
        method=method,
    )
    found = {name: asr(run, "personal") for name, run in runs.items()}
    assert found["seen"] > 0.3 > found["hardly"] and found["blended"] < 0.15
    assert found["seen"] > found["unpoisoned"] + 0.1 and found["unpoisoned"] > 0.4 * found["seen"]
