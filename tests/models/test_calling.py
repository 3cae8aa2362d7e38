"""Models of transformers, with their default dropout: built from small configs, nothing is downloaded."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast
from holdfast.data.samples import Samples
from holdfast.evaluation.evaluate import score
from holdfast.local.fit import Recipe
from holdfast.local.plan import Plan
from holdfast.models.calling import adapt
from holdfast.models.fit_check import check_fits
from holdfast.models.network import Network
from tests.experiment.sessions import TINY
from tests.helpers import LOOP, VMAP, deal, random_samples, starts, train

SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
COUNTS = [7, 2, 12]


class Tokens(nn.Module):
    """Called as models of transformers are."""

    def __init__(self, pad: int | None) -> None:
        super().__init__()
        self.table, self.config = nn.Embedding(9, 3), SimpleNamespace(pad_token_id=pad)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return {"logits": (self.table(input_ids) * mask[..., None]).sum(1)}


@pytest.mark.parametrize("pad", [None, 0, 4])
def test_a_batch_of_tokens_gives_logits_without_its_padding(pad: int | None) -> None:
    plain, tokens = Tokens(pad), torch.tensor([[1, 4, 0], [2, 3, 5]])
    module = adapt(plain)
    real = tokens != (pad or 0)
    want = (plain.table(tokens) * real[..., None]).sum(1)
    torch.testing.assert_close(module(tokens), want)
    # a call with keywords is the module's own
    assert torch.equal(module(input_ids=tokens)["logits"], plain.table(tokens).sum(1))
    assert [name for name, _ in module.named_parameters()] == ["table.weight"]


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(vocab_size=50, max_position_embeddings=16, num_labels=3, **SMALL)
    )


def distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    sizes = {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 16, "max_position_embeddings": 16}
    return DistilBertForSequenceClassification(DistilBertConfig(vocab_size=50, num_labels=3, **sizes))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return GPT2ForSequenceClassification(GPT2Config(vocab_size=50, num_labels=3, **sizes, **ends))


def vit(classes: int = 3) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    images = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": classes}
    return ViTForImageClassification(ViTConfig(**SMALL, **dropout, **images))


def texts() -> Samples:
    made = torch.Generator().manual_seed(0)
    x, y = torch.randint(2, 50, (60, 7), generator=made), torch.randint(0, 3, (60,), generator=made)
    x[::3, 4:] = 0
    return Samples(x.to(torch.int32), y, 3, 60)


@pytest.mark.slow
@pytest.mark.parametrize("make", [bert, distilbert, gpt2, vit])
def test_models_of_transformers_train_the_same_alone_and_in_a_stack(make: Callable[[], nn.Module]) -> None:
    samples = random_samples(60, (1, 8, 8)) if make is vit else texts()
    fit = check_fits(make(), "mine", samples.batch(torch.arange(2), torch.float64), 3, "texts")
    assert fit.adapt and fit.draws
    network = Network(lambda: adapt(make()), None, f"transformers {make.__name__}", torch.float64)
    network.draws = fit.draws
    data = deal(samples, COUNTS)

    def trained(plan: Plan) -> Tensor:
        recipe = Recipe(lr=0.1, epochs=2, batch_size=5)
        model = train(network, starts(network, 3), samples, data, recipe, plan).model
        got = score(network, lambda net, x, aux: net(x), model, torch.arange(3), samples, data, plan)
        return torch.cat([model, got.loss[:, None].double()], 1)

    alone = trained(LOOP)
    for plan in (VMAP, Plan("captured-vmap"), Plan("compiled-loop")):
        torch.testing.assert_close(trained(plan), alone, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_a_model_of_transformers_from_start_to_end(tmp_path: Path) -> None:
    make = lambda: vit(10)  # noqa: E731
    given = {**TINY, "model": holdfast.Model(make, head="classifier"), "method": "fedper"}
    run = holdfast.run(given, out=tmp_path / "run")
    module = run.model(client=0)
    images = torch.zeros(2, 1, 8, 8, dtype=next(module.parameters()).dtype)
    assert torch.equal(module(images), module(pixel_values=images).logits)
    bare = holdfast.run({**given, "model": make}, out=tmp_path / "bare")
    assert bare.final["accuracy"] == run.final["accuracy"]


@pytest.mark.slow
def test_the_example_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```py\n(.*?)```", page, re.S)
    exec(compile(example, "models.md", "exec"), {})
    assert (tmp_path / "runs" / "vit" / "result.json").exists()


@pytest.mark.slow
def test_a_model_of_transformers_that_does_not_fit() -> None:
    from transformers import BertModel

    images = torch.zeros(2, 1, 8, 8)
    with pytest.raises(holdfast.HoldfastError, match="layer 'bert.embeddings'.*it reads tokens"):
        check_fits(bert(), "mine", images, 3, "images")
    with pytest.raises(holdfast.HoldfastError, match="use its variant for classification"):
        check_fits(BertModel(bert().config), "mine", texts().batch(torch.arange(2)), 3, "texts")
