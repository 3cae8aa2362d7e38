"""Measures the parts of `benchmarks/scale.py`: `python benchmarks/scale.py --measure cpu` (or cuda)."""

from __future__ import annotations

import datetime
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLIENTS = 1_000
WIDTH, LAYERS, HEADS, TOKENS, BATCH, RANK = 768, 12, 12, 128, 16, 27
RANKS = 2
"""Processes that exchange rows for columns."""
Part = dict[str, Any]


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
    """86 million parameters, most of them frozen, of the size of BERT base without its words, and the
    adapters, which are trained."""
    net = nn.Sequential(*(Block() for _ in range(LAYERS)))
    for name, value in net.named_parameters():
        value.requires_grad_(".down." in name or ".up." in name)
    return net, [value for value in net.parameters() if value.requires_grad]


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The least seconds of a call; a first one does not count."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    work()
    best = math.inf
    for _ in range(repeats):
        wait()
        began = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - began)
    return best


def measure(device: torch.device, columns: int, repeats: int) -> dict[str, Part]:
    """Measure every part that this device can: the step of a client with adapters on a GPU only, the exchange
    of rows for columns on a CPU only."""
    torch.manual_seed(0)
    cuda = device.type == "cuda"
    source = {
        "command": f"python benchmarks/scale.py --measure {device.type} --columns {columns}",
        "device": torch.cuda.get_device_name() if cuda else f"{os.cpu_count()} cores, {platform.machine()}",
        "date": datetime.date.today().isoformat(),
        "versions": f"Python {platform.python_version()}, PyTorch {torch.__version__}",
    }
    found = server_parts(device, columns, repeats)
    if cuda:
        found["adapters"] = {"what": step_words(), "seconds": adapter_step(device, repeats), "stack": 1}
    else:
        found["rows to columns"] = exchange(columns, repeats)
    return {name: {**part, **source} for name, part in found.items()}


def server_parts(device: torch.device, columns: int, repeats: int) -> dict[str, Part]:
    """Time what the server's rules cannot do without, as `benchmarks/aggregators.py` does."""
    size = {"clients": CLIENTS, "columns": columns}
    found: dict[str, Part] = {}
    stack = torch.randn(CLIENTS, columns, device=device)
    weights = torch.full((CLIENTS,), 1 / CLIENTS, device=device)
    found["mean"] = {"what": "w @ x", "seconds": seconds(lambda: weights @ stack, device, repeats), **size}
    found["gram"] = {"what": "x @ x.T", "seconds": seconds(lambda: stack @ stack.T, device, repeats), **size}
    block = stack[:, : columns // 16].T.contiguous()  # in parts, as the rules do it
    sort = 16 * seconds(lambda: block.sort(dim=1), device, max(3, repeats // 4))
    found["sort"] = {"what": "sort along the clients, in 16 blocks", "seconds": sort, **size}
    return found


def step_words() -> str:
    return f"step of one client, {BATCH} samples of {TOKENS} tokens, bf16 autocast, SGD"


def adapter_step(device: torch.device, repeats: int) -> float:
    """Seconds of one step of a client that trains adapters."""
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

    return seconds(step, device, repeats)


def exchange(columns: int, repeats: int) -> Part:
    """Time rows for columns: each of two processes has half of the clients and gets half of the columns of
    all, by one all_to_all of gloo over the loopback network, with the copy that puts each receiver's part in
    one piece."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_exchange, (folder, columns, repeats), nprocs=RANKS)
        best = float((Path(folder) / "seconds").read_text())
    sent = 4 * (CLIENTS // RANKS) * (columns - columns // RANKS)
    what = f"all_to_all of gloo between {RANKS} processes on loopback, with the copy before it"
    return {"what": what, "seconds": best, "clients": CLIENTS, "columns": columns, "bytes sent by each": sent}


def _exchange(rank: int, folder: str, columns: int, repeats: int) -> None:
    from torch import distributed

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS
    )
    rows = torch.randn(CLIENTS // RANKS, columns)
    received = torch.empty(RANKS, CLIENTS // RANKS, columns // RANKS)

    def once() -> None:
        distributed.barrier()
        parts = rows.unflatten(1, (RANKS, -1)).transpose(0, 1).contiguous()
        distributed.all_to_all_single(received, parts)

    best = seconds(once, torch.device("cpu"), repeats)
    if rank == 0:
        (Path(folder) / "seconds").write_text(repr(best))
    distributed.destroy_process_group()
