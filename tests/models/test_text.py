"""Networks for texts: what a word's hash looks up, and that padding never counts, alone, in stacks and in
whole runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import build, register
from holdfast.data.samples import Samples
from holdfast.data.sources import Source
from holdfast.experiment.loop import Experiment
from holdfast.local.fit import Recipe
from holdfast.models.hashed_embedding import HashedEmbedding
from holdfast.results.run import Run
from tests.helpers import (
    LOOP,
    PLANS,
    assert_same,
    deal,
    everything,
    methods_in_turn,
    network_of,
    starts,
    tiny,
    train,
)

HASHES = torch.tensor([[7, 2**31 - 1, 12, 0, 0], [4, 4, 4, 4, 4], [0, 0, 0, 0, 0]])
TEXTS: dict[str, dict[str, Any]] = {
    "text-mean": {"name": "text-mean", "rows": 30, "embedding": 4, "hidden": 5},
    "text-cnn": {"name": "text-cnn", "rows": 30, "embedding": 4, "channels": 3, "dropout": 0.2},
}
every_text = pytest.mark.parametrize("name", TEXTS)


def net(name: str, length: int = 5, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = build("model", {**TEXTS[name], **changes}).build((length,), 3)
    return made.double().eval()


def test_a_hash_looks_up_its_row_and_padding_none() -> None:
    words = HashedEmbedding(10, 3)
    with torch.no_grad():
        words.table.weight.copy_(torch.arange(10.0)[:, None])  # row 0 too, as if it had been written
    # 1 + (7 - 1) % 9, 1 + (2^31 - 2) % 9, 1 + (12 - 1) % 9
    assert words(HASHES)[:, :, 0].tolist() == [[7, 1 + (2**31 - 2) % 9, 3, 0, 0], [4] * 5, [0] * 5]


def test_the_mean_is_over_real_words() -> None:
    mean = net("text-mean").get_submodule("backbone.0")
    table = mean.get_parameter("words.table.weight")
    rows = [1 + (h - 1) % 29 for h in (7, 2**31 - 1, 12)]
    out = mean(HASHES)
    torch.testing.assert_close(out[0], table[rows].mean(0))
    torch.testing.assert_close(out[1], table[4])
    assert torch.equal(out[2], torch.zeros(4, dtype=torch.float64))


def test_the_cnn_takes_maxima_over_windows_that_begin_in_the_text() -> None:
    maxima = net("text-cnn").get_submodule("backbone.0")
    table, out = maxima.get_parameter("words.table.weight"), maxima(HASHES)
    for i, text in enumerate(HASHES.tolist()):
        vectors = [table[1 + (h - 1) % 29] if h else torch.zeros(4, dtype=torch.float64) for h in text]
        vectors += [torch.zeros(4, dtype=torch.float64)] * 4
        for j, kernel in enumerate((3, 4, 5)):
            weight, bias = (maxima.get_parameter(f"convolutions.{j}.{name}") for name in ("weight", "bias"))
            best = torch.zeros(3, dtype=torch.float64)
            for start in range(sum(h > 0 for h in text)):
                seen = torch.stack(vectors[start : start + kernel], 1)  # [embedding, kernel]
                best = torch.maximum(best, (weight[:, :, 0] * seen).sum((1, 2)) + bias)
            torch.testing.assert_close(out[i, 3 * j : 3 * j + 3], best)


@every_text
def test_the_length_of_the_padding_does_not_matter(name: str) -> None:
    short, long = net(name, 2), net(name, 40)
    x = HASHES[:, :2]
    torch.testing.assert_close(short(x), long(nn.functional.pad(x, (0, 38))))
    assert torch.isfinite(short(torch.zeros(1, 2, dtype=torch.int64))).all()


def test_a_row_for_padding_learns_nothing_on_any_plan() -> None:
    """A user's own Embedding: vmap by itself would teach it."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(6, 3, padding_idx=0, sparse=True), nn.Linear(3, 3)
            nn.init.ones_(self.table.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x.clamp(max=5)).sum(1))

    network = network_of(Sums)
    samples, model = Samples(HASHES.int(), torch.tensor([0, 1, 2]), 3, 3), starts(network, 2)
    fitted = [
        train(network, model, samples, deal(samples, [2, 1]), Recipe(lr=0.5, batch_size=2), plan).model
        for plan in PLANS.values()
    ]
    for other in fitted:
        torch.testing.assert_close(other, fitted[0], rtol=0, atol=1e-12)
    table = network.layout.unflatten(fitted[0])["table.weight"]
    assert torch.equal(table[:, 0], torch.ones(2, 3, dtype=torch.float64)) and not torch.equal(
        table[0, 4], torch.ones(3).double()
    )


@every_text
def test_texts_give_the_same_bits_every_time(name: str) -> None:
    """A row that many words share sums its gradients in a fixed order."""
    part = build("model", {**TEXTS[name], "rows": 3})
    network = network_of(lambda: part.build((30,), 3), torch.float32)
    x = Key(0).hash(40, 30).remainder(2**31 - 1).int() + 1
    samples = Samples(x, torch.arange(40) % 3, 3, 40)
    for plan in (LOOP, PLANS["vmap"]):
        first, second = (
            train(network, starts(network, 2), samples, deal(samples, [20, 20]), Recipe(), plan).model
            for _ in range(2)
        )
        assert torch.equal(first, second)


# ---- whole runs


@pytest.fixture
def texts(forget: None) -> None:
    """A source of short texts whose first word gives the class."""

    @register("source", "texts")
    class Texts(Source):
        def load(self, dir: Path | None) -> Samples:
            key = Key(0).fold("texts")
            y = key.fold("y").hash(200).remainder(4)
            x = key.fold("x").hash(200, 6).remainder(2**31 - 1) + 1
            x[:, 0] = 10**6 * (y + 1)
            ends = 1 + key.fold("end").hash(200).remainder(6)
            return Samples(torch.where(torch.arange(6) < ends[:, None], x, 0).int(), y, 4, 160)


def of_texts(name: str, **changes: Any) -> dict[str, Any]:
    table: dict[str, Any] = {"data": {"name": "texts", "partition": {"name": "iid"}}, "model": TEXTS[name]}
    return {**table, **changes}


@every_text
@pytest.mark.parametrize(
    "method", [name for name in methods_in_turn() if getattr(name, "values", None) != ("fedbn",)]
)  # needs BatchNorm
def test_every_method_trains_on_texts(
    name: str, method: str, texts: None, simulate: Callable[..., Run]
) -> None:
    plans = ("loop", "vmap", "compiled-vmap")
    loop, vmap, compiled = (
        everything(simulate(**of_texts(name, method=method, engine={"plan": plan}))) for plan in plans
    )
    assert_same(loop, vmap, 1e-10)
    assert_same(loop, compiled, 1e-10)


def test_a_run_on_texts_learns_and_can_be_loaded(texts: None, simulate: Callable[..., Run]) -> None:
    train = {"rounds": 12, "local_epochs": 5, "lr": 0.3, "dtype": "float32"}
    run = simulate(**of_texts("text-mean", method="fedavg", train=train, engine={"plan": "auto"}))
    assert run.final["accuracy"] > 0.8
    first = torch.tensor([[10**6 * (c + 1), 0, 0, 0, 0, 0] for c in range(4)])
    assert run.model()(first).argmax(1).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model": {"name": "mlp"}},
            "model 'mlp' needs numbers, but a sample is a text of 6 words; try text-cnn, text-mean",
        ),
        (
            {"model": {"name": "fedcap-cnn"}},
            (
                "model 'fedcap-cnn' needs images [channels, height, width] or windows [channels, length], but"
                " a sample is a text of 6 words; try text-cnn, text-mean"
            ),
        ),
        (
            {"data": {"name": "digits"}},
            (
                "model 'text-cnn' needs the words of a text, but a sample has shape [1, 8, 8]; try cnn-512,"
                " cnn-bn, fedcap-cnn, lenet, mlp"
            ),
        ),
        (
            {"train": {"augment": {"flip": 0.5}}},
            "augment needs images [channels, height, width], but a sample has shape [6]; leave it out",
        ),
    ],
    ids=["mlp", "cnn", "images", "augment"],
)
def test_samples_that_do_not_fit_are_a_one_line_error(
    changes: dict[str, Any], words: str, texts: None, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        Experiment(tiny(**{**of_texts("text-cnn"), **changes}), tmp_path / "run")
    assert words in str(error.value) and "\n" not in str(error.value)
