"""What a real federation costs: seconds of a round and megabytes a second, for models of several sizes and
for more and more nodes.

    python -m benchmarks.federation --markdown        # 4 nodes: FedCAP's network (156,810 parameters) and
                                                      ResNet-18 (11 million)
    python -m benchmarks.federation --models fedcap-cnn --nodes 4 8 16 --rounds 2

Every part is a real process on this machine, with TLS, keys and the proxy. A client makes one step on a few
random images, so nearly all of a round is what the federation itself takes: messages, new processes, checks,
the disk. Seconds are the median between two committed rounds (of a single one since the start); each round is
two exchanges: in training a model travels to every client and back, in evaluation to it. Memory is the most
that all processes of the federation, server and nodes, were seen to hold, what they share counted once; of a
further node the part that it shares with no other process.

    python -m benchmarks.federation --models fedcap-cnn --work      # and CPU seconds of a round, by process
    python -m benchmarks.federation --models fedcap-cnn --alone     # memory of one node as on its own machine

`--alone` starts the server and one node as commands, and counts what the node's processes hold: what they
share with one another once, and files that are mapped (libraries) once, as if no other program had them."""

from __future__ import annotations

import argparse
import datetime
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.federation_processes import Memory, Work, alone
from holdfast.deploy.processes import free_port
from holdfast.deploy.project import Project, init
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


def begin(folder: Path, model: str, nodes: int, rounds: int) -> Project:
    """A federation whose nodes have a few random images each."""
    experiment = folder / "experiment.toml"
    experiment.write_text(EXPERIMENT.format(nodes=nodes, model=model, rounds=rounds))
    project = init(folder / "federation", nodes, port=free_port(), experiment=experiment)
    for client in range(nodes):
        (project.node(client) / "load.py").write_text(LOAD)
        settings = project.node(client) / "node.toml"
        kept = [line for line in settings.read_text().splitlines() if not line.startswith("function")]
        settings.write_text("\n".join([*kept, 'function = "load.py:load"']) + "\n")
    return project


def measure(
    folder: Path, model: str, nodes: int, rounds: int, timeout: float, work: bool
) -> dict[str, float]:
    """One federation from its start to its end."""
    project = begin(folder, model, nodes, rounds)
    began = time.monotonic()
    watch: list[Work] = []

    def say(line: str) -> None:
        print(f"  {time.monotonic() - began:6.0f} s  {line}", flush=True)
        if work and line.startswith("round 1:"):
            watch.append(Work(up.processes))

    up = RunningFederation(project, say)
    with Memory(up.processes) as memory, up:
        started = time.monotonic() - began
        up.run(timeout)
        for seen in watch:
            seen.show(rounds - 1)
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
        "further": memory.further / 1e6,
        "missed": sum(len(entry.what["clients"]) for entry in project.ledger().of("missing")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["fedcap-cnn", "resnet18"])
    parser.add_argument("--nodes", nargs="+", type=int, default=[4])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=1200.0)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--work", action="store_true", help="print the CPU seconds of a round, by process")
    parser.add_argument("--alone", action="store_true", help="measure the memory of one node instead")
    chosen = parser.parse_args()
    if chosen.alone:
        for model in chosen.models:
            with tempfile.TemporaryDirectory() as folder:
                print(f"{model}: {alone(begin(Path(folder), model, 1, 1000)) / 1e6:.0f} MB", flush=True)
        return
    titles = (
        "model",
        "parameters",
        "nodes",
        "seconds to start",
        "seconds a round",
        "MB a round",
        "MB/s",
        "GB of memory",
        "MB of a further node",
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
        "further": ".0f",
        "missed": ".0f",
    }
    lines = [titles]
    for model in chosen.models:
        for nodes in chosen.nodes:
            print(f"{model}, {nodes} nodes", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                row = measure(Path(folder), model, nodes, chosen.rounds, chosen.timeout, chosen.work)
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
