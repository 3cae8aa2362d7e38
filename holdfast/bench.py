"""`holdfast bench`: the time of a client's training step, under every plan and in a plain PyTorch client loop, measured side by side.

Plans take turns (plain, loop, vmap, plain, ...) and the best of several turns counts, so that a busy machine slows all of them alike.
Ratios are times of the plain loop over times of a plan in the same session; nothing is compared with numbers from elsewhere."""

from __future__ import annotations

import datetime
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.core.errors import ConfigError, suggest
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.data.federation import Padded, Samples
from holdfast.local.fit import Recipe, fit
from holdfast.local.forecast import choose
from holdfast.local.plan import Plan, on_threads
from holdfast.models.network import Network

_MEMORY = 2 * 10**9  # of a stack: the default of engine.memory
_BUDGET = {True: 8.0, False: 45.0}  # seconds for a work, quick or not
_UNIT = "seconds: of one step of one client, the best of several turns; ratio: the plain loop's seconds over the plan's"


@dataclass(frozen=True)
class Work:
    """Something to train: a network, and clients with equally many samples."""

    name: str
    model: dict[str, Any]
    source: dict[str, Any]
    clients: int
    samples: int
    epochs: int = 1
    batch_size: int = 10
    lr: float = 0.01

    @property
    def client_steps(self) -> int:
        return self.clients * self.epochs * -(-self.samples // self.batch_size)


WORKS = (
    Work("digits-mlp-100", {"name": "mlp", "hidden": 64}, {"name": "digits"}, clients=100, samples=20, epochs=5),
    Work("cnn28-20", {"name": "fedcap-cnn"}, {"name": "synthetic", "shape": (1, 28, 28), "classes": 62}, clients=20, samples=100),
    Work("cnn32-20", {"name": "fedcap-cnn"}, {"name": "synthetic", "shape": (3, 32, 32)}, clients=20, samples=100),
    Work("cnn-bn-20", {"name": "cnn-bn"}, {"name": "synthetic", "shape": (1, 28, 28)}, clients=20, samples=100),
)


@dataclass
class Bench:
    """A work made ready, and what was measured of it."""

    work: Work
    network: Network
    samples: Samples
    data: Padded
    initial: Tensor
    model: nn.Module
    """The user's own module, for the plain loop."""
    seconds: dict[str, float] = field(default_factory=dict)
    picks: Counter[str] = field(default_factory=Counter)
    choosing: float = float("inf")

    @classmethod
    def of(cls, work: Work) -> Bench:
        samples = build("source", work.source).load(None)
        part = build("model", work.model)
        network = Network(lambda: part.build(samples.sample_shape, samples.classes))
        rows = torch.arange(work.clients * work.samples).view(work.clients, -1) % len(samples)
        data = Padded(rows, samples.y[rows], torch.full((work.clients,), work.samples))
        initial = network.initial(Key(0))
        return cls(work, network, samples, data, initial, network.load(initial))

    @property
    def recipe(self) -> Recipe:
        return Recipe(lr=self.work.lr, epochs=self.work.epochs, batch_size=self.work.batch_size)

    @property
    def key(self) -> Key:
        return Key(0).fold(torch.arange(self.work.clients))

    def choose(self, asked: str) -> Plan:
        return choose(asked, self.network, self.initial, self.samples, self.data, self.recipe, self.work.clients, _MEMORY).plan

    def fit(self, plan: Plan) -> Tensor:
        stack = self.initial.expand(self.work.clients, -1)
        return fit(self.network, stack, self.samples, self.data, self.key, self.recipe, plan).model

    def plain(self, x: Tensor, start: dict[str, Tensor], order: Callable[[int, int], Tensor]) -> list[dict[str, Tensor]]:
        """What one writes by hand: one module for all clients, normalised samples, shuffled indices, torch.optim.SGD, no DataLoader."""
        work, model, y, trained = self.work, self.model.train(), self.data.labels, []
        for client in range(work.clients):
            model.load_state_dict(start)
            optimiser = torch.optim.SGD(model.parameters(), lr=work.lr)
            own_x, own_y = x[client], y[client]
            for epoch in range(work.epochs):
                for batch in order(client, epoch).split(work.batch_size):
                    optimiser.zero_grad()
                    F.cross_entropy(model(own_x[batch]), own_y[batch]).backward()
                    optimiser.step()
            trained.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return trained

    def measure(self, budget: float) -> None:
        """Let the plans take turns for so many seconds, and three times if that takes less than twice as long; a first turn warms up."""
        plans = {name: self.choose(name) for name in ("loop", "vmap")}
        self._turn(plans)
        self.seconds.clear()
        self.picks.clear()
        turns, began, spent = 0, time.perf_counter(), 0.0
        while not turns or spent < budget or (turns < 3 and spent < 2 * budget):
            self._turn(plans)
            turns, spent = turns + 1, time.perf_counter() - began

    def _turn(self, plans: dict[str, Plan]) -> None:
        """Every plan once, and the choice of `auto` once more, because under noise it may fall differently."""
        x = self.samples.batch(self.data.rows)
        start = {name: tensor.clone() for name, tensor in self.network.load(self.initial).state_dict().items()}
        self._clock("plain", lambda: self.plain(x, start, lambda client, epoch: torch.randperm(self.work.samples)))
        for name, plan in plans.items():
            self._clock(name, partial(self.fit, plan))
        began = time.perf_counter()
        self.picks[self.choose("auto").name] += 1
        self.choosing = min(self.choosing, time.perf_counter() - began)

    def _clock(self, name: str, run: Callable[[], object]) -> None:
        began = time.perf_counter()
        run()
        taken = (time.perf_counter() - began) / self.work.client_steps
        self.seconds[name] = min(taken, self.seconds.get(name, float("inf")))

    def rows(self) -> list[dict[str, Any]]:
        """`auto` gets the time of the slowest plan that it ever picked."""
        times = {**self.seconds, "auto": max(self.seconds[name] for name in self.picks)}
        common = {
            "work": self.work.name, "clients": self.work.clients, "client_steps": self.work.client_steps,
            "parameters": self.network.layout.parameters,
        }  # fmt: skip
        rows = [{**common, "plan": name, "seconds": taken, "ratio": times["plain"] / taken} for name, taken in times.items()]
        rows[-1] |= {"picked": dict(self.picks), "choosing_seconds": self.choosing}
        return rows


def run_bench(
    names: Sequence[str] | None = None, quick: bool = False, threads: int | None = None, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measure the named works, by default all. `quick` takes fewer turns: under a minute in all on an idle machine, with more noise."""
    works = find_works(names)
    rows: list[dict[str, Any]] = []
    with on_threads(threads):
        for work in works:
            bench = Bench.of(work)
            bench.measure(_BUDGET[quick])
            rows += bench.rows()
            say(_sentence(bench.rows()))
        return {"rows": rows, "unit": _UNIT, **_machine()}


def find_works(names: Sequence[str] | None) -> list[Work]:
    known = {work.name: work for work in WORKS}
    for name in names or ():
        if name not in known:
            raise ConfigError(f"unknown work '{name}'{suggest(name, known)}")
    return [known[name] for name in names] if names else list(WORKS)


def _sentence(rows: list[dict[str, Any]]) -> str:
    parts = [f"{row['plan']} {row['seconds'] * 1e6:.0f} us ({row['ratio']:.2f}x)" for row in rows]
    return f"{rows[0]['work']}, per client step: " + ", ".join(parts)


def _machine() -> dict[str, Any]:
    return {
        "device": f"cpu ({platform.processor() or platform.machine()})", "torch": torch.__version__, "threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
