"""What a round of a large federation costs: 100,000 registered clients, 1,000 of them in the cohort, on 1, 8
and 64 GPUs. The table is computed from measured parts by a formula (`costs`), nothing in it is a measurement
of the whole:

    python benchmarks/scale.py --measure cuda --out parts.json      # seconds of the parts on a GPU; a minute
    python benchmarks/scale.py --parts parts.json                   # the table from these parts
    python benchmarks/scale.py                                      # from the parts of docs/scale.md
    python benchmarks/scale.py --network-gbps 100 --disk-gbps 7     # for other links and disks

Steps of the first two networks come from `benchmarks/gpu_table.py`; `--measure` times a step with adapters of
a transformer, and, for 1,000 clients, one Gram product, one sort and one weighted sum."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.core.files import write_json

REGISTERED, COHORT = 100_000, 1_000
STEPS = 100
"""Steps of a client in a round: 200 samples in batches of 10, five times, for example."""
GPUS = (1, 8, 64)
WIDTH, LAYERS, HEADS, TOKENS, BATCH, RANK = 768, 12, 12, 128, 16, 27
PARTS_FILE = Path(__file__).resolve().parent / "records" / "scale.json"


@dataclass(frozen=True)
class Model:
    """What clients train and send: `step` is the measured seconds of one client's step on one GPU."""

    name: str
    sent: int
    """Numbers that travel in each direction."""
    step: float


@dataclass(frozen=True)
class Links:
    """Bytes per second: between GPUs, and of the disk or file system that keeps private rows, for each
    machine of eight GPUs."""

    network: float
    disk: float


def models(parts: dict[str, Any]) -> list[Model]:
    steps = parts["steps"]
    return [
        Model("FedCAP's CIFAR-10 network", 156_810, steps["cifar-48x20"]),
        Model("ResNet18", 11_173_962, steps["resnet18-10"]),
        Model("adapters of a transformer", parts["adapters"], steps["adapters"]),
    ]


def costs(model: Model, gpus: int, parts: dict[str, Any], links: Links) -> dict[str, float]:
    """The parts of a round in seconds and bytes. The cohort is cut evenly; server work is cut by columns."""
    stack = 4 * COHORT * model.sent
    machines = max(1, gpus // 8)
    # what is measured for 1,000 clients and a million columns grows with the columns
    share = model.sent / parts["columns"] / gpus
    apart = (gpus - 1) / gpus
    found = {
        "train": COHORT * STEPS * model.step / gpus,
        "rows to columns": stack / gpus * apart / links.network,
        "mean": parts["mean"] * share,
        "krum": parts["gram"] * share + 8 * COHORT**2 * apart / links.network,
        "median": parts["sort"] * share,
        "model to all": 4 * model.sent * apart / links.network,
        "private rows": 2 * stack / machines / links.disk,
    }
    whole = sum(found[name] for name in ("train", "rows to columns", "median", "model to all"))
    return {
        **found,
        "round, no private rows": whole,
        "round, private rows": max(whole, found["private rows"]),
        "bytes up": float(stack),
        "stack on a GPU": float(stack) / gpus,
        "private rows on disk": 4.0 * REGISTERED * model.sent,
    }


# ---- measured parts


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of two small matrices beside it."""

    def __init__(self, layer: nn.Linear, rank: int):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


class Block(nn.Module):
    """A layer of a transformer whose queries and values have adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.value = (Adapted(nn.Linear(WIDTH, WIDTH), RANK) for _ in range(2))
        self.key, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        heads = [
            part(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        ]
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.after(x))))


def transformer() -> tuple[nn.Module, list[nn.Parameter]]:
    """86 million frozen parameters, of the size of BERT base without its words, and about a million in
    adapters."""
    net = nn.Sequential(*(Block() for _ in range(LAYERS)))
    for name, value in net.named_parameters():
        value.requires_grad_(".down." in name or ".up." in name)
    return net, [value for value in net.parameters() if value.requires_grad]


def seconds(work: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """The least seconds of a call."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    best = math.inf
    for _ in range(repeats):
        wait()
        began = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - began)
    return best


def measure(device: torch.device, columns: int, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    net, trained = transformer()
    net.to(device)
    x = torch.randn(BATCH, TOKENS, WIDTH, device=device)
    rule = torch.optim.SGD(trained, lr=1e-4)

    def step() -> None:
        rule.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = net(x).float().square().mean()
        loss.backward()
        rule.step()

    step()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "adapters": sum(value.numel() for value in trained),
        "frozen": sum(value.numel() for value in net.parameters() if not value.requires_grad),
        "steps": {"adapters": seconds(step, device, repeats)},
        "columns": columns,
    }
    stack = torch.randn(COHORT, columns, device=device)
    weights = torch.full((COHORT,), 1 / COHORT, device=device)
    found["mean"] = seconds(lambda: weights @ stack, device, repeats)
    found["gram"] = seconds(lambda: stack @ stack.T, device, repeats)
    block = stack[:, : columns // 16].T.contiguous()  # sorted in parts: a whole copy would not be made either
    found["sort"] = 16 * seconds(lambda: block.sort(dim=1), device, max(3, repeats // 4))
    return found


# ---- the table


def in_units(value: float) -> str:
    """Seconds, short."""
    return f"{value:,.0f} s" if value >= 10 else f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def in_bytes(value: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError


def table(parts: dict[str, Any], links: Links) -> str:
    rows = [(model, gpus, costs(model, gpus, parts, links)) for model in models(parts) for gpus in GPUS]
    names = list(rows[0][2])
    lines = [
        "| model | GPUs | " + " | ".join(names) + " |",
        "|---|---:|" + "---:|" * len(names),
    ]
    for model, gpus, found in rows:
        cells = (
            in_bytes(value)
            if name in ("bytes up", "stack on a GPU", "private rows on disk")
            else in_units(value)
            for name, value in found.items()
        )
        lines.append(f"| {model.name} ({model.sent:,}) | {gpus} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--measure", choices=("cpu", "cuda"), help="measure the parts on this device")
    options.add_argument("--out", type=Path, help="where to write what was measured")
    options.add_argument(
        "--columns", type=int, default=1_000_000, help="columns of the stack that is measured"
    )
    options.add_argument("--repeats", type=int, default=20, help="calls of which the fastest counts")
    options.add_argument("--parts", type=Path, default=PARTS_FILE, help="measured parts")
    options.add_argument("--network-gbps", type=float, default=50.0, help="GB/s of each GPU's link")
    options.add_argument("--disk-gbps", type=float, default=2.0, help="GB/s of each machine's disk")
    asked = options.parse_args()
    if asked.measure:
        found = measure(torch.device(asked.measure), asked.columns, asked.repeats)
        print(json.dumps(found, indent=1))
        if asked.out:
            write_json(asked.out, found)
        return
    links = Links(asked.network_gbps * 1e9, asked.disk_gbps * 1e9)
    parts = json.loads(asked.parts.read_text())
    print(f"{REGISTERED:,} registered clients, {COHORT:,} in the cohort, {STEPS} steps each\n")
    print(table(parts, links))


if __name__ == "__main__":
    main()
