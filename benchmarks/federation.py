"""What a real federation costs: seconds of a round and megabytes a second, for models of several sizes and
for more and more nodes.

    python benchmarks/federation.py --markdown        # 4 nodes: FedCAP's network (156,810 parameters) and
                                                      ResNet-18 (11 million)
    python benchmarks/federation.py --models fedcap-cnn --nodes 4 8 16 --rounds 2

Every part is a real process on this machine, with TLS, keys and the proxy. A client makes one step on a few
random images, so nearly all of a round is what the federation itself takes: messages, new processes, checks,
the disk. Seconds are the median between two committed rounds (of a single one since the start); each round is
two exchanges: in training a model travels to every client and back, in evaluation to it. Memory is the most
that all processes of the federation, server and nodes, were seen to hold, what they share counted once."""

from __future__ import annotations

import argparse
import datetime
import statistics
import tempfile
import threading
import time
from pathlib import Path

from holdfast.deploy.processes import Processes, free_port
from holdfast.deploy.project import init
from holdfast.deploy.up import RunningFederation
from holdfast.results.run import Run

EXPERIMENT = """
[data]
name = "declared"
clients = {nodes}
options = {{ shape = [3, 32, 32], classes = 10, samples = "numbers", mean = [0.0], std = [1.0], most = 40 }}
[model]
name = "{model}"
[method]
name = "fedavg"
[train]
rounds = {rounds}
local_steps = 1
batch_size = 8
[engine]
threads = 1
"""
LOAD = """import torch

def load():
    return torch.rand(40, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 10
"""


def measure(folder: Path, model: str, nodes: int, rounds: int, timeout: float) -> dict[str, float]:
    """One federation from its start to its end."""
    experiment = folder / "experiment.toml"
    experiment.write_text(EXPERIMENT.format(nodes=nodes, model=model, rounds=rounds))
    project = init(folder / "federation", nodes, port=free_port(), experiment=experiment)
    for client in range(nodes):
        (project.node(client) / "load.py").write_text(LOAD)
        settings = project.node(client) / "node.toml"
        kept = [line for line in settings.read_text().splitlines() if not line.startswith("function")]
        settings.write_text("\n".join([*kept, 'function = "load.py:load"']) + "\n")
    began = time.monotonic()
    up = RunningFederation(
        project, lambda line: print(f"  {time.monotonic() - began:6.0f} s  {line}", flush=True)
    )
    with Memory(up.processes) as memory, up:
        started = time.monotonic() - began
        up.run(timeout)
    moments = [*(project.ledger().of("start") if rounds == 1 else []), *project.ledger().of("round")]
    at = [datetime.datetime.fromisoformat(entry.at).timestamp() for entry in moments]
    run = Run(project.run)
    seconds = statistics.median(b - a for a, b in zip(at, at[1:], strict=False))
    size = float(run.manifest["parameters"]) * 4 / 1e6
    megabytes = 3 * nodes * size  # up and down in training, down in evaluation
    return {
        "parameters": run.manifest["parameters"],
        "nodes": nodes,
        "started": started,
        "seconds": seconds,
        "megabytes": megabytes,
        "rate": megabytes / seconds,
        "memory": memory.most / 1e9,
        "missed": sum(len(entry.what["clients"]) for entry in project.ledger().of("missing")),
    }


class Memory:
    """Looks every few seconds at how much a federation holds."""

    def __init__(self, processes: Processes):
        self.processes, self.most, self.done = processes, 0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.done.wait(5):
            self.most = max(self.most, sum(map(held, self.processes.alive())))


def held(pid: int) -> int:
    """Bytes of a process; of what it shares with others its part only."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # just gone
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["fedcap-cnn", "resnet18"])
    parser.add_argument("--nodes", nargs="+", type=int, default=[4])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=1200.0)
    parser.add_argument("--markdown", action="store_true")
    chosen = parser.parse_args()
    titles = (
        "model",
        "parameters",
        "nodes",
        "seconds to start",
        "seconds a round",
        "MB a round",
        "MB/s",
        "GB of memory",
        "answers missed",
    )
    forms = {
        "parameters": ",.0f",
        "nodes": ".0f",
        "started": ".0f",
        "seconds": ".1f",
        "megabytes": ".1f",
        "rate": ".1f",
        "memory": ".1f",
        "missed": ".0f",
    }
    lines = [titles]
    for model in chosen.models:
        for nodes in chosen.nodes:
            print(f"{model}, {nodes} nodes", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                row = measure(Path(folder), model, nodes, chosen.rounds, chosen.timeout)
            lines.append((model, *(format(row[name], form) for name, form in forms.items())))
            show(lines, chosen.markdown)  # after each: what is measured is not lost if a larger one fails


def show(lines: list[tuple[str, ...]], markdown: bool) -> None:
    edge = "| " if markdown else ""
    for place, line in enumerate(lines):
        print(edge + " | ".join(line) + (" |" if markdown else ""), flush=True)
        if place == 0 and markdown:
            print("|---|" + "---:|" * (len(line) - 1))


if __name__ == "__main__":
    main()
