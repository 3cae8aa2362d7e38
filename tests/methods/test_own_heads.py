"""The common model under each client's own head, and updates as of one model again."""

from __future__ import annotations

import torch

from holdfast.core.flat import Layout, Wire
from holdfast.core.types import ROOT, Uplink, broadcast
from holdfast.methods.own_heads import as_of_one_model, under_own_heads
from tests.methods.halves import close, double

MODEL = double([1.0, 2.0, 3.0, 9.0])  # the last is a buffer
WIRE = Wire(torch.arange(4), 3, True, Layout(()))
HEAD = torch.tensor([False, True, True])


def test_there_and_back() -> None:
    asked = broadcast("train", MODEL, torch.tensor([ROOT, 2, 4, 7]))
    sent = under_own_heads(
        asked, MODEL, HEAD, torch.tensor([1, 4, 7]), double([[0.0, 0.0], [5.0, 6.0], [7.0, 8.0]])
    )
    close(sent.bank[sent.pick[:, 0]], [[1, 2, 3, 9], [1, 2, 3, 9], [1, 5, 6, 9], [1, 7, 8, 9]])
    assert len(sent.bank) == 3  # the plain one travels from one row
    up = Uplink(
        torch.tensor([ROOT, 4, 7]), {"update": double([[0.5, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, -1.0]])}
    )
    back = as_of_one_model(up, sent, MODEL, WIRE)
    close(back["update"] + MODEL[:3], [[1.5, 2, 3], [1, 6, 6], [1, 7, 7]])


def test_without_heads_or_replies_nothing_changes() -> None:
    nobody = torch.zeros(0, dtype=torch.int64)
    asked = broadcast("train", MODEL, torch.tensor([2, 4]))
    sent = under_own_heads(asked, MODEL, HEAD, nobody, double([]).reshape(0, 2))
    assert sent.bank.tolist() == [MODEL.tolist()] and sent.pick.tolist() == [[0], [0]]
    none = Uplink(nobody, {"update": double([]).reshape(0, 3)})
    assert as_of_one_model(none, sent, MODEL, WIRE)["update"].shape == (0, 3)
