"""FedBN: everything travels but BatchNorm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from holdfast import Model
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.local.fit import Recipe
from holdfast.results.run import Run
from tests.helpers import network_of, slow_fit
from tests.methods.two import close, rows, server


def test_which_entries_are_normalisation() -> None:
    network = network_of(
        lambda: nn.Sequential(
            nn.Linear(1, 2), nn.BatchNorm1d(2), nn.GroupNorm(1, 2), nn.Sequential(nn.BatchNorm1d(1))
        )
    )
    found = {
        slot.name
        for slot in network.layout.slots
        if bool(network.normalisation[slot.start : slot.stop].all())
    }
    parts = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert found == {f"{layer}.{part}" for layer in ("1", "3.0") for part in parts}
    assert int(network.normalisation.sum()) == 4 * 2 + 1 + 4 * 1 + 1


def test_two_rounds_slowly(simulate: Callable[..., Run]) -> None:
    """Each client goes on from its own normalisation and the common rest, whose average alone moves."""
    run = simulate(method="fedbn", train={"rounds": 2})
    experiment = run._experiment
    network, federation = experiment.network, experiment.federation
    mine, share = network.normalisation, federation.train.counts.double() / federation.train.counts.sum()
    w, own = experiment.initial.clone(), {c: experiment.initial.clone() for c in range(5)}
    for round in (1, 2):
        for c in range(5):
            key = Key(0).fold("client", round, 0).fold(torch.tensor([c])).fold("fit")
            start = torch.where(mine, own[c], w)
            data = federation.train.take(torch.tensor([c]))
            own[c] = slow_fit(
                network, start[None], federation.samples, data, key, Recipe(lr=0.1, epochs=1, batch_size=5)
            )[0]
        w = sum((share[c] * own[c] for c in range(5)), torch.zeros_like(w))
    torch.testing.assert_close(server(run), w[~mine], rtol=0, atol=1e-12)
    for c in range(5):
        torch.testing.assert_close(run.vector(c), torch.where(mine, own[c], w), rtol=0, atol=1e-12)
        torch.testing.assert_close(rows(run, c)["own"], own[c], rtol=0, atol=1e-12)


def test_one_client_alone_is_fedavgs(simulate: Callable[..., Run]) -> None:
    table = {
        "model": {"name": "cnn-bn", "channels": [3], "hidden": 5},
        "data": {"clients": 1, "partition": {"name": "iid"}},
    }
    bn, average = (simulate(method=name, **table) for name in ("fedbn", "fedavg"))
    close(bn.vector(0), average.vector())


def test_only_the_rest_is_paid_for(simulate: Callable[..., Run]) -> None:
    run = simulate(method="fedbn")
    rest = 64 * 6 + 6 + 6 * 10 + 10
    assert (
        run.metrics["bytes/down"].tolist() == [5 * rest * 8] * 2
        and run.metrics["bytes/up"].tolist() == [5 * (rest + 2) * 8] * 2
    )


@pytest.mark.parametrize(
    "model", [{"name": "mlp"}, Model(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), head="1")]
)
def test_a_model_without_batch_norm_is_refused_in_one_line(
    model: object, simulate: Callable[..., Run]
) -> None:
    with pytest.raises(
        ConfigError, match=r"^method fedbn: the model has no BatchNorm layer to keep; choose one that has"
    ):
        simulate(method="fedbn", model=model)
