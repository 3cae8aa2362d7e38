"""A user's module is tried on two samples before a run: what does not fit is one line that names the
layer."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.core.errors import ConfigError
from holdfast.models.fit_check import Fit, check_fits

NUMBERS = torch.linspace(-1, 1, 12).view(2, 6)
IMAGES = torch.linspace(0, 1, 128).view(2, 1, 8, 8)
TOKENS = torch.tensor([[3, 1, 0], [9, 4, 2]])


def tried(module: nn.Module, batch: Tensor = NUMBERS, classes: int = 3) -> Fit:
    return check_fits(module, "mine", batch, classes, "numbers")


def refused(module: nn.Module, batch: Tensor = NUMBERS, classes: int = 3) -> str:
    with pytest.raises(ConfigError) as refusal:
        tried(module, batch, classes)
    return str(refusal.value)


class Answers(nn.Module):
    """A linear layer whose answer goes through a function."""

    def __init__(self, answer: Callable[[Tensor, bool], Any], width: int = 3):
        super().__init__()
        self.fc, self.answer = nn.Linear(6, width), answer

    def forward(self, x: Tensor) -> Any:
        return self.answer(self.fc(x), self.training)


class Counting(nn.Module):
    """Draws random numbers in training, and counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.passes = nn.Linear(6, 3), nn.BatchNorm1d(3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.norm(self.fc(x)) + (torch.rand(3) if self.training else 0)


def test_trying_a_module_changes_no_state() -> None:
    module = Counting()
    before, state = copy.deepcopy(module.state_dict()), torch.random.get_rng_state()
    assert tried(module, NUMBERS.double()) == Fit(adapt=False, draws=True)
    assert module.passes == 0 and module.training and torch.equal(state, torch.random.get_rng_state())
    assert all(
        torch.equal(value, before[name]) and value.dtype == before[name].dtype
        for name, value in module.state_dict().items()
    )
    assert not module._forward_hooks and not module.fc._forward_pre_hooks


@pytest.mark.parametrize(
    "module, batch, words",
    [
        (
            nn.Sequential(nn.Flatten(), nn.Linear(60, 3)),
            IMAGES,
            "model 'mine' cannot read samples of shape [1, 8, 8] of 'numbers' (3 classes): layer '1',"
            " Linear(in_features=60, out_features=3, bias=True), received [2, 64]: RuntimeError: mat1 and"
            " mat2 shapes cannot be multiplied (2x64 and 60x3); set in_features to 64",
        ),
        (nn.Sequential(nn.Conv2d(3, 3, 8), nn.Flatten()), IMAGES, "; set in_channels to 1"),
        (nn.Conv1d(1, 3, 8), IMAGES, "; it needs [samples, channels, length]"),
        (nn.Sequential(nn.Embedding(9, 4), nn.Flatten()), NUMBERS, "an Embedding needs whole numbers"),
        (nn.Sequential(nn.Embedding(9, 1), nn.Flatten()), TOKENS, "token 9: set num_embeddings (vocab_size)"),
        (nn.Sequential(nn.Linear(3, 3)), TOKENS, "whole numbers (tokens of a text), which need an Embedding"),
        (nn.Linear(6, 2), NUMBERS, "has 2 outputs, but 'numbers' has 3 classes; it needs 3 or more"),
        (nn.Linear(8, 3), IMAGES, "returns shape [2, 1, 8, 3] for a batch of shape [2, 1, 8, 8]"),
        (Answers(lambda out, training: (out, out)), NUMBERS, "returns a tuple"),
        (
            nn.Sequential(nn.Linear(6, 3), nn.Threshold(9.0, torch.inf), nn.Identity()),
            NUMBERS,
            "NaN or infinity for a batch of shape [2, 6] before any training; layer '1' is the first",
        ),
        (Answers(lambda out, training: F.dropout(out)), NUMBERS, "in evaluation mode"),
        (
            Answers(lambda out, training: out + torch.randint(0, 2, (1,)) * training),
            NUMBERS,
            "draws random numbers in evaluation mode",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(module: nn.Module, batch: Tensor, words: str) -> None:
    said = refused(module, batch)
    assert words in said and "\n" not in said


def test_what_cannot_be_drawn_by_key_names_its_layer() -> None:
    recurrent = nn.LSTM(6, 3, 2, dropout=0.5)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = recurrent

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x[None])[0][0]

    assert "model 'mine': layer 'rnn' draws random numbers that cannot be drawn by key" in refused(
        Recurrent()
    )
    recurrent.dropout = 0.0
    assert tried(Recurrent()) == Fit(adapt=False, draws=False)


def test_more_outputs_than_classes_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "holdfast"):
        tried(nn.Linear(6, 5))
    assert caplog.messages == [
        "model 'mine' has 5 outputs, but 'numbers' has 3 classes; the others are never right"
    ]


@pytest.mark.parametrize(
    "module, draws",
    [
        (nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)), False),  # has its key as a buffer
        (Answers(lambda out, training: F.dropout(out, 0.5, training)), True),
        (Answers(lambda out, training: F.scaled_dot_product_attention(out, out, out)), True),
        (Answers(lambda out, training: out + torch.empty(3).zero_()), False),
    ],
)
def test_whether_functions_draw_is_found(module: nn.Module, draws: bool) -> None:
    assert tried(module).draws == draws


def test_logits_in_a_dict_or_an_object_are_found() -> None:
    class Output:
        def __init__(self, logits: Tensor):
            self.logits = logits

    assert tried(Answers(lambda out, training: {"logits": out, "loss": None})).adapt
    assert tried(Answers(lambda out, training: Output(out))).adapt
    assert "returns a dict" in refused(Answers(lambda out, training: {"scores": out}))
    assert "has 2 outputs" in refused(Answers(lambda out, training: Output(out), 2))
