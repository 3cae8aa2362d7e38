"""What one round costs and who answers in it: bytes, seconds, refusals, losses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from holdfast.core.types import ROOT, TESTS, Exchange, Uplink
from holdfast.evaluation import metrics


class Meter:
    """Counts the exchanges of one round. `quiet` names the tasks that do not count as taking part."""

    def __init__(self, quiet: frozenset[str] = frozenset()) -> None:
        self.quiet = quiet | TESTS
        self.seconds = {"client": 0.0, "server": 0.0, "evaluate": 0.0}
        self.up = self.down = self.exchanges = self.steps = 0
        self.asked: set[int] = set()
        self.losses: list[Tensor] = []
        self.answers: list[metrics.Answers] = []
        self.refused: dict[int, str] = {}
        self.answered: set[int] = set()

    def took_part(self) -> Tensor:
        """Clients that did something in this round; a client that was drawn but lost is not among them."""
        return torch.tensor(sorted(self.answered), dtype=torch.int64)

    def next_step(self) -> int:
        """Exchanges of a round are numbered from 0; those of its evaluation go on counting."""
        self.steps += 1
        return self.steps - 1

    @contextmanager
    def timing(self, side: str) -> Iterator[None]:
        """Add the seconds spent within to those of the clients, the server or the evaluation."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[side] += time.perf_counter() - started

    def count(self, exchange: Exchange, up: Uplink) -> None:
        """Add one exchange and the reply to it. The root pseudo-client costs no traffic."""
        asked, answered = exchange.to != ROOT, up.ids[up.ids != ROOT].tolist()
        refused = {client: reason for client, reason in up.refused.items() if client != ROOT}
        self.exchanges += 1
        self.asked.update(exchange.to[asked].tolist())
        self.down += int(exchange.bytes_down()[asked].sum())
        self.up += int(up.bytes_up()[up.ids != ROOT].sum())
        self.refused.update(up.refused)
        self.answers.append((answered, refused))
        if exchange.task not in self.quiet:
            self.answered.update(answered, refused)
        if "loss" in up.fields:
            self.losses.append(up["loss"][up.ids != ROOT])

    def figures(self) -> metrics.Figures:
        losses = torch.cat(self.losses).double() if self.losses else torch.zeros(0)
        return {
            "bytes/up": self.up,
            "bytes/down": self.down,
            "cohort": len(self.asked),
            "refused": len(self.refused.keys() - {ROOT}),
            "loss/train": float(losses.mean()) if len(losses) else None,
        }
