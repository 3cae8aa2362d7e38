"""Every plan on a device against plan `loop` on the CPU, in float64; the same training twice in TF32 and
bf16, bit for bit; and whether a training waits for the device:

    python benchmarks/equal_plans.py cuda                    # about four minutes on a GPU, most of them
                                                             compiling
    python benchmarks/equal_plans.py cuda text-mean cnn-bn   # only these networks




"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, get_args

import torch

from holdfast.core.device import Precision, deterministic_math
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.data.federation import Padded, Samples
from holdfast.local.fit import Fitted, Recipe, fit
from holdfast.local.plan import REPLAYED, Plan, PlanName
from holdfast.local.programs import refusals
from holdfast.models.network import Network

CPU = torch.device("cpu")
NETWORKS = {"cnn-bn": (1, 28, 28), "fedcap-cnn": (3, 32, 32), "text-mean": (24,), "text-cnn": (24,)}
SMALL = {"text-mean": {"rows": 512}, "text-cnn": {"rows": 512}}


def world(
    model: str, clients: int, samples: int, dtype: torch.dtype, ragged: bool
) -> tuple[Network, Samples, Padded]:
    shape = NETWORKS[model]
    store = (
        _words(shape)
        if model.startswith("text")
        else build("source", {"name": "synthetic", "shape": shape}).load(None)
    )
    part = build("model", {"name": model, **SMALL.get(model, {})})
    network = Network(
        lambda: part.build(store.sample_shape, store.classes), signature=f"{model} {dtype}", dtype=dtype
    )
    rows = torch.arange(clients * samples).view(clients, -1) % len(store)
    count = torch.full((clients,), samples) - (torch.arange(clients) * 3 % (samples // 2) if ragged else 0)
    return network, store, Padded(rows, store.y[rows], count)


def _words(shape: tuple[int, ...]) -> Samples:
    luck = torch.Generator().manual_seed(0)
    words = torch.randint(1, 2**31 - 1, (2000, *shape), generator=luck, dtype=torch.int64).to(torch.int32)
    length = torch.randint(0, shape[0] + 1, (2000, 1), generator=luck)
    words[torch.arange(shape[0]) >= length] = 0
    return Samples(words, torch.arange(2000) % 10, 10, 2000, name="words")


def train(
    world: tuple[Network, Samples, Padded],
    recipe: Recipe,
    plan: Plan,
    device: torch.device,
    pulled: bool = False,
) -> Fitted:
    network, store, data = world
    network.module.to(device)
    n, start = len(data.count), network.initial(Key(0)).to(device)
    options: dict[str, Any] = (
        {"pull": (network.initial(Key(1)).to(device).expand(n, -1), 0.1)} if pulled else {}
    )
    on_device = Padded(data.rows.to(device), data.labels.to(device), data.count)
    with deterministic_math(device, plan.precision):
        return fit(
            network,
            start.expand(n, -1),
            store.on(device),
            on_device,
            Key(0).fold(torch.arange(n)),
            recipe,
            plan,
            **options,
        )


def main(device: torch.device, models: Sequence[str]) -> None:
    for model in models:
        recipe = Recipe(lr=0.05, epochs=2, batch_size=5, momentum=0.5, weight_decay=1e-3)
        exact = world(model, 6, 24, torch.float64, ragged=True)
        want = train(exact, recipe, Plan("loop"), CPU, pulled=True)
        for name in get_args(PlanName):
            sizes = (3, 8) if name in REPLAYED and Plan(name).stacked else ()
            got = train(exact, recipe, Plan(name, sizes=sizes), device, pulled=True)
            print(
                f"{model:11} {name:14} {device} against cpu loop:"
                f" {float((got.model.cpu() - want.model).abs().max()):.1e}",
                flush=True,
            )
        rough = world(model, 20, 100, torch.float32, ragged=False)
        for name in get_args(PlanName):
            for precision in get_args(Precision)[1:]:
                plan = Plan(name, precision=precision)
                once, *again = (train(rough, Recipe(), plan, device).model.clone() for _ in range(3))
                others = [
                    f"{int((other != once).any(1).sum())} clients by {float((other - once).abs().max()):.1e}"
                    for other in again
                ]
                same = all(torch.equal(once, other) for other in again)
                print(
                    f"{model:11} {name:14} {precision} again:"
                    f" {'same bits' if same else f'OTHER BITS {others}'}",
                    flush=True,
                )
        if device.type == "cuda":
            _waits(rough, device)
    print(f"{refusals()} programs could not be made", flush=True)


def _waits(rough: tuple[Network, Samples, Padded], device: torch.device) -> None:
    network, store, data = rough
    n, ready = len(data.count), Padded(data.rows.to(device), data.labels.to(device), data.count)
    start, key = network.initial(Key(0)).to(device).expand(n, -1), Key(0).fold(torch.arange(n))
    for name in get_args(PlanName)[1:]:  # the loop asks for every step anew
        plan = Plan(name, precision="tf32")
        with deterministic_math(device, "tf32"):
            fit(network, start, store.on(device), ready, key, Recipe(), plan)
            torch.cuda.set_sync_debug_mode("error")
            try:
                fit(network, start, store.on(device), ready, key, Recipe(), plan)
                print(f"{name:14} waits for nothing", flush=True)
            except RuntimeError as error:
                print(f"{name:14} WAITS: {error}", flush=True)
            finally:
                torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    main(torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu"), sys.argv[2:] or list(NETWORKS))
