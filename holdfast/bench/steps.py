"""Times a client's training step for `holdfast bench`: under every plan and in a plain PyTorch loop over
clients.

Plans take turns (plain, loop, vmap, plain, ...) and the best of several turns counts, so a busy machine slows
all of them alike. Ratios are times of the plain loop over times of a plan in the same session; nothing is
compared with numbers from elsewhere. A GPU has its own workloads, among them a whole round (rounds.py)."""

from __future__ import annotations

import datetime
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.bench.rounds import ROUNDS, RoundWork
from holdfast.core.device import Precision, deterministic_math
from holdfast.core.errors import ConfigError, suggest
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.data.federation import Padded, Samples
from holdfast.experiment.planner import memory_bound, pick_device
from holdfast.local.fit import Recipe, fit
from holdfast.local.plan import Plan, PlanName, on_threads
from holdfast.local.plan_choice import choose
from holdfast.local.programs import forget
from holdfast.models.network import Network

_BUDGET = {True: 8.0, False: 45.0}  # seconds for a work, quick or not
_DEVICE_BUDGET = {True: 4.0, False: 20.0}  # the same on a GPU, besides what compiling takes
_UNIT = (
    "seconds: of one step of one client (work ditto-round: of a whole round), the best of several turns; "
    "ratio: seconds of what it is measured against over the plan's"
)
_LONG = 1e7  # steps of a run that is long enough for any preparation


@dataclass(frozen=True)
class Work:
    """A workload: a network, and clients with equally many samples."""

    name: str
    model: dict[str, Any]
    source: dict[str, Any]
    clients: int
    samples: int
    epochs: int = 1
    batch_size: int = 10
    lr: float = 0.01
    device: str = "cpu"
    plans: tuple[tuple[PlanName, Precision], ...] = (("loop", "fp32"), ("vmap", "fp32"))
    looped: int | None = None
    """How many of the clients the plain loops train, where all would take too long; each client costs the
    same."""

    def client_steps(self, clients: int | None = None) -> int:
        return (clients or self.clients) * self.epochs * -(-self.samples // self.batch_size)


_FEDCAP, _CIFAR = {"name": "fedcap-cnn"}, {"name": "synthetic", "shape": (3, 32, 32)}
_TF32: tuple[PlanName, Precision] = ("compiled-vmap", "tf32")
_BF16: tuple[PlanName, Precision] = ("compiled-vmap", "bf16")
_HALF: tuple[PlanName, Precision] = ("compiled-vmap", "bf16-activations")
_ALL_PLANS: tuple[tuple[PlanName, Precision], ...] = (
    ("loop", "tf32"),
    ("captured-loop", "tf32"),
    ("vmap", "tf32"),
    ("captured-vmap", "tf32"),
    _TF32,
    _BF16,
    _HALF,
)
WORKS = (
    Work(
        "digits-mlp-100", {"name": "mlp", "hidden": 64}, {"name": "digits"}, clients=100, samples=20, epochs=5
    ),
    Work(
        "cnn28-20",
        {"name": "fedcap-cnn"},
        {"name": "synthetic", "shape": (1, 28, 28), "classes": 62},
        clients=20,
        samples=100,
    ),
    Work(
        "cnn32-20",
        {"name": "fedcap-cnn"},
        {"name": "synthetic", "shape": (3, 32, 32)},
        clients=20,
        samples=100,
    ),
    Work(
        "cnn-bn-20", {"name": "cnn-bn"}, {"name": "synthetic", "shape": (1, 28, 28)}, clients=20, samples=100
    ),
    Work("cifar-20", _FEDCAP, _CIFAR, clients=20, samples=225, device="cuda", plans=_ALL_PLANS),
    Work(
        "cifar-48x20",
        _FEDCAP,
        _CIFAR,
        clients=960,
        samples=225,
        device="cuda",
        plans=(_TF32, _BF16, _HALF),
        looped=20,
    ),
    Work(
        "resnet18-10",
        {"name": "resnet18"},
        _CIFAR,
        clients=10,
        samples=512,
        epochs=5,
        batch_size=64,
        device="cuda",
        plans=(
            ("loop", "tf32"),
            ("captured-loop", "tf32"),
            ("compiled-loop", "tf32"),
            ("compiled-loop", "bf16"),
            ("compiled-loop", "bf16-activations"),
        ),
    ),
)


@dataclass
class Bench:
    """A workload with its network and data, and its measurements."""

    work: Work
    network: Network
    samples: Samples
    data: Padded
    initial: Tensor
    model: nn.Module
    """The user's own module, for the plain loop."""
    seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    picks: Counter[str] = field(default_factory=Counter)
    choosing: float = float("inf")

    @classmethod
    def of(cls, work: Work) -> Bench:
        device = torch.device(work.device)
        samples = build("source", work.source).load(None).on(device)
        part = build("model", work.model)
        network = Network(lambda: part.build(samples.sample_shape, samples.classes))
        network.module.to(device)
        rows = torch.arange(work.clients * work.samples, device=device).view(work.clients, -1) % len(samples)
        data = Padded(rows, samples.y[rows], torch.full((work.clients,), work.samples))
        initial = network.initial(Key(0))
        return cls(work, network, samples, data, initial.to(device), network.load(initial).to(device))

    @property
    def device(self) -> torch.device:
        return self.data.rows.device

    @property
    def recipe(self) -> Recipe:
        return Recipe(lr=self.work.lr, epochs=self.work.epochs, batch_size=self.work.batch_size)

    @property
    def key(self) -> Key:
        return Key(0).fold(torch.arange(self.work.clients))

    def looped(self, plan: Plan | None) -> int:
        """Return how many clients a turn of this plan trains; None is the plain loop."""
        return (
            self.work.clients if plan is not None and plan.stacked else self.work.looped or self.work.clients
        )

    def choose(self, asked: str, precision: Precision = "fp32") -> Plan:
        return choose(
            asked,
            self.network,
            self.initial,
            self.samples,
            self.data,
            self.recipe,
            self.work.clients,
            memory_bound("auto", self.device),
            precision,
            _LONG,
        ).plan

    def fit(self, plan: Plan) -> Tensor:
        n = self.looped(plan)
        data = Padded(self.data.rows[:n], self.data.labels[:n], self.data.count[:n])
        with deterministic_math(self.device, plan.precision):
            return fit(
                self.network, self.initial.expand(n, -1), self.samples, data, self.key[:n], self.recipe, plan
            ).model

    def plain(
        self, x: Tensor, start: dict[str, Tensor], order: Callable[[int, int], Tensor]
    ) -> list[dict[str, Tensor]]:
        """Train as hand-written code does: one module for all clients, normalised samples, shuffled indices,
        torch.optim.SGD, no DataLoader."""
        work, model, y, trained = self.work, self.model.train(), self.data.labels, []
        for client in range(self.looped(None)):
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
        """Let the plans take turns for `budget` seconds, at least three times if that takes less than twice
        as long; a first turn warms up."""
        on_cpu = self.device.type == "cpu"
        plans = {
            _title(name, precision): (
                self.choose(name, precision) if on_cpu else Plan(name, precision=precision)
            )
            for name, precision in self.work.plans
        }
        self._turn(plans)
        self.seconds.clear()
        self.picks.clear()
        turns, began, spent = 0, time.perf_counter(), 0.0
        while not turns or spent < budget or (turns < 3 and spent < 2 * budget):
            self._turn(plans)
            turns, spent = turns + 1, time.perf_counter() - began

    def _turn(self, plans: dict[str, Plan]) -> None:
        """Time every plan once; on a CPU also repeat the choice of `auto`, which may differ under noise."""
        x = self.samples.batch(self.data.rows[: self.looped(None)])
        start = {
            name: tensor.to(self.device)
            for name, tensor in self.network.load(self.initial).state_dict().items()
        }
        self._clock(
            "plain",
            None,
            lambda: self.plain(x, start, lambda c, e: torch.randperm(self.work.samples, device=self.device)),
        )
        for name, plan in plans.items():
            self._clock(name, plan, partial(self.fit, plan))
        if self.device.type == "cpu":
            began = time.perf_counter()
            self.picks[self.choose("auto").name] += 1
            self.choosing = min(self.choosing, time.perf_counter() - began)

    def _clock(self, name: str, plan: Plan | None, run: Callable[[], object]) -> None:
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        began = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize(self.device)
            self.memory[name] = torch.cuda.max_memory_allocated(self.device)
        taken = (time.perf_counter() - began) / self.work.client_steps(self.looped(plan))
        self.seconds[name] = min(taken, self.seconds.get(name, float("inf")))

    def rows(self) -> list[dict[str, Any]]:
        """Return the measurements; `auto` gets the time of the slowest plan that it ever picked."""
        times = {
            **self.seconds,
            **({"auto": max(self.seconds[name] for name in self.picks)} if self.picks else {}),
        }
        common = {
            "work": self.work.name,
            "clients": self.work.clients,
            "client_steps": self.work.client_steps(),
            "parameters": self.network.layout.parameters,
        }
        rows = [
            {
                **common,
                "plan": name,
                "seconds": taken,
                "ratio": times["plain"] / taken,
                "against": "plain",
                **({"memory": self.memory[name]} if name in self.memory else {}),
            }
            for name, taken in times.items()
        ]
        if self.picks:
            rows[-1] |= {"picked": dict(self.picks), "choosing_seconds": self.choosing}
        return rows


def _title(name: str, precision: Precision) -> str:
    return name if precision == "fp32" else f"{name} {precision}"


def run_bench(
    names: Sequence[str] | None = None,
    quick: bool = False,
    threads: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Measure the named workloads, by default all of the device. `quick` takes fewer turns: under a minute in
    all on an idle machine, with more noise."""
    where = pick_device(device)
    rows: list[dict[str, Any]] = []
    budget = (_BUDGET if where.type == "cpu" else _DEVICE_BUDGET)[quick]
    with on_threads(threads):
        for work in find_works(names, where.type):
            if isinstance(work, Work):
                bench = Bench.of(replace(work, device=device))
                bench.measure(budget)
                fresh = bench.rows()
            else:
                fresh = work.rows()
            rows += fresh
            say(_sentence(fresh))
            forget()
        return {"rows": rows, "unit": _UNIT, **_machine(where)}


def find_works(names: Sequence[str] | None, device: str = "cpu") -> list[Work | RoundWork]:
    known: dict[str, Work | RoundWork] = {
        work.name: work for work in (*WORKS, *ROUNDS) if work.device == device
    }
    for name in names or ():
        if name not in known:
            raise ConfigError(f"unknown workload '{name}' on {device}{suggest(name, known)}")
    return [known[name] for name in names] if names else list(known.values())


def _sentence(rows: list[dict[str, Any]]) -> str:
    parts = [f"{row['plan']} {row['seconds'] * 1e6:.0f} us ({row['ratio']:.2f}x)" for row in rows]
    return f"{rows[0]['work']}: " + ", ".join(parts)


def _machine(device: torch.device) -> dict[str, Any]:
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu ({platform.processor() or platform.machine()})"
    )
    return {
        "device": name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
