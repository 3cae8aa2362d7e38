"""`holdfast bench`: the time of a client's training step, under every plan and in a plain PyTorch client loop, measured side by side.

Plans take turns (plain, loop, vmap, plain, ...) and the best of several turns counts, so that a busy machine slows all of them alike.
Ratios are times of the plain loop over times of a plan in the same session; nothing is compared with numbers from elsewhere."""

from __future__ import annotations

import datetime
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.core.errors import ConfigError, suggest
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.data.federation import Padded, Samples
from holdfast.local.fit import Recipe, fit
from holdfast.local.forecast import choose
from holdfast.local.plan import Plan, PlanName
from holdfast.models.network import Network

_MEMORY = 2 * 10**9  # of a stack: the default of engine.memory
_LR = 0.01
_PLANS: tuple[PlanName, ...] = ("loop", "vmap")


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

    @property
    def client_steps(self) -> int:
        return self.clients * self.epochs * -(-self.samples // self.batch_size)


WORKS = (
    Work("digits-mlp-100", {"name": "mlp", "hidden": 64}, {"name": "digits"}, clients=100, samples=20, epochs=5),
    Work("cnn28-20", {"name": "fedcap-cnn", "form": "emnist"}, {"name": "synthetic", "shape": (1, 28, 28), "classes": 62}, 20, 100),
    Work("cnn32-20", {"name": "fedcap-cnn", "form": "cifar"}, {"name": "synthetic", "shape": (3, 32, 32)}, 20, 100),
    Work("cnn-bn-20", {"name": "cnn-bn"}, {"name": "synthetic", "shape": (1, 28, 28)}, 20, 100),
)


@dataclass
class Bench:
    """A work made ready, and what was measured of it."""

    work: Work
    network: Network
    samples: Samples
    data: Padded
    initial: Tensor
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
        return cls(work, network, samples, data, network.initial(Key(0)))

    @property
    def recipe(self) -> Recipe:
        return Recipe(lr=_LR, epochs=self.work.epochs, batch_size=self.work.batch_size)

    def fit(self, plan: Plan) -> Tensor:
        key = Key(0).fold(torch.arange(self.work.clients))
        stack = self.initial.expand(self.work.clients, -1)
        return fit(self.network, stack, self.samples, self.data, key, self.recipe, plan).model

    def plain(self, x: Tensor, order: Callable[[int, int], Tensor]) -> list[dict[str, Tensor]]:
        """What one writes by hand: one module for all clients, normalised samples, shuffled indices, torch.optim.SGD, no DataLoader."""
        work, y = self.work, self.data.labels
        model = self.network.load(self.initial).train()
        start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        trained = []
        for client in range(work.clients):
            model.load_state_dict(start)
            optimiser = torch.optim.SGD(model.parameters(), lr=_LR)
            own_x, own_y = x[client], y[client]
            for epoch in range(work.epochs):
                for batch in order(client, epoch).split(work.batch_size):
                    optimiser.zero_grad()
                    F.cross_entropy(model(own_x[batch]), own_y[batch]).backward()
                    optimiser.step()
            trained.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return trained

    def turn(self) -> None:
        """Every plan once, and the choice of `auto` once more, because it may fall differently under noise."""
        x = self.samples.batch(self.data.rows)
        shuffled = lambda client, epoch: torch.randperm(self.work.samples)  # noqa: E731
        self._clock("plain", lambda: self.plain(x, shuffled))
        for name in _PLANS:
            self._clock(name, lambda name=name: self.fit(Plan(name)))
        started = time.perf_counter()
        picked = choose("auto", self.network, self.initial, self.samples, self.data, self.recipe, self.work.clients, _MEMORY).plan
        self.choosing = min(self.choosing, time.perf_counter() - started)
        self.picks[picked.name] += 1

    def _clock(self, name: str, run: Callable[[], object]) -> None:
        started = time.perf_counter()
        run()
        taken = (time.perf_counter() - started) / self.work.client_steps
        self.seconds[name] = min(taken, self.seconds.get(name, float("inf")))

    def rows(self) -> list[dict[str, Any]]:
        """`auto` is given the time of the slowest plan that it ever picked."""
        times = dict(self.seconds)
        times["auto"] = max(times[name] for name in self.picks)
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
    """Measure the named works (all of them by default). `quick` takes fewer turns: under a minute, with more noise."""
    works = find_works(names)
    rows: list[dict[str, Any]] = []
    with _threads(threads):
        for work in works:
            bench = Bench.of(work)
            bench.turn()  # the first turn warms up
            bench.seconds.clear()
            for _ in range(3 if quick else 10):
                bench.turn()
            rows += bench.rows()
            say(_sentence(rows, work.name))
        return {"rows": rows, "unit": "seconds per client step, the best of several turns; ratio: of the plain loop's to the plan's", **_machine()}


def find_works(names: Sequence[str] | None) -> list[Work]:
    known = {work.name: work for work in WORKS}
    for name in names or ():
        if name not in known:
            raise ConfigError(f"unknown work '{name}'{suggest(name, known)}")
    return [known[name] for name in names] if names else list(WORKS)


def _sentence(rows: list[dict[str, Any]], work: str) -> str:
    parts = [f"{row['plan']} {row['seconds'] * 1e6:.0f} us ({row['ratio']:.2f}x)" for row in rows if row["work"] == work]
    return f"{work}: " + ", ".join(parts)


def _machine() -> dict[str, Any]:
    return {
        "device": f"cpu ({platform.processor() or platform.machine()})", "torch": torch.__version__, "threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
