"""FedAS, Fig. 3a: parameters with much Fisher information carry the model, the same number of others does
not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast.core.errors import ConfigError
from holdfast.diagnostics.fisher import _replaced, most_informative_replaced
from holdfast.results.run import Run
from tests.helpers import network_of


def test_the_top_parameters_carry_the_model(simulate: Callable[..., Run]) -> None:
    run = simulate(
        method="fedas",
        data={"partition": {"name": "pathological", "classes_per_client": 2}},
        model={"name": "mlp", "hidden": 32},
        train={"rounds": 4, "local_epochs": 3},
        evaluate={"clients": "all"},
    )
    frame = most_informative_replaced(run)
    assert list(frame.columns) == [
        "client",
        "samples",
        "before",
        "top",
        "random",
    ] and frame.client.tolist() == list(range(5))
    assert frame.before.tolist() == pytest.approx(run.clients()["accuracy/personal"].tolist())
    assert frame.top.mean() < frame.random.mean() - 0.1 <= frame.before.mean()
    assert most_informative_replaced(run).equals(frame)  # nothing is left to chance
    one = most_informative_replaced(run, by="zero", clients=[3])
    assert one.client.tolist() == [3] and one.before.tolist() == frame.before[3:4].tolist()
    nothing = most_informative_replaced(run, share=0.0)
    assert nothing.top.tolist() == nothing.random.tolist() == nothing.before.tolist()


def test_a_client_without_test_samples_has_no_accuracy(simulate: Callable[..., Run]) -> None:
    run = simulate(
        method="fedas", data={"clients": 3, "split": {"train": 1.0, "test": 0.0}}, train={"rounds": 1}
    )
    table = most_informative_replaced(run)
    assert table["samples"].tolist() == [0, 0, 0] and table[["before", "top", "random"]].isna().all(axis=None)


def test_the_highest_ranking_parameters_are_replaced_and_no_buffer() -> None:
    network = network_of(lambda: torch.nn.BatchNorm1d(2))  # weight, bias; mean, variance, counter
    models, rank = (
        torch.arange(14.0).view(2, 7),
        torch.tensor([[1.0, 4, 3, 2, 9, 9, 9], [4.0, 1, 2, 3, 9, 9, 9]]),
    )
    got = _replaced(network, models, torch.full((7,), -1.0), rank, 0.5)
    assert got.tolist() == [[0, -1, -1, 3, 4, 5, 6], [-1, 8, 9, -1, 11, 12, 13]]


def test_impossible_questions(simulate: Callable[..., Run]) -> None:
    run = simulate(method="fedas", train={"rounds": 1})
    with pytest.raises(ConfigError, match="share is a part of the parameters"):
        most_informative_replaced(run, share=5)
    with pytest.raises(ConfigError, match="fresh"):
        most_informative_replaced(run, by="one")  # type: ignore[arg-type]
