"""Sweeps on a Ray cluster of two nodes in this machine, for test_ray.py: a process of its own, so that it can
be ended as a whole. It prints what happened as JSON.

`ports` starts the cluster of --ray; `node` kills a node in the middle of a sweep of 12 cells; `samples` hands
data and a plug-in to workers that have neither."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# before ray is imported: everything listens on the loopback address
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import numpy as np

import holdfast
from holdfast.experiment.config import make_config
from holdfast.experiment.runner import RunCallbacks
from holdfast.sweeps.grid import expand
from holdfast.sweeps.launch_ray import OnRay
from holdfast.sweeps.ray_executor import LOCAL, connected
from holdfast.sweeps.runner import sweep
from tests.experiment.kills import table

STORE = 80 << 20  # bytes of each node's object store


@contextmanager
def cluster(*cpus: int) -> Iterator[tuple[Any, list[Any]]]:
    """A cluster whose first node has no CPU for tasks, and the others so many."""
    import ray
    from ray.cluster_utils import Cluster

    about = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE}
    made = Cluster(initialize_head=True, head_node_args=about)
    try:
        yield made, [made.add_node(num_cpus=many, object_store_memory=STORE) for many in cpus]
    finally:
        ray.shutdown()
        made.shutdown()


def listening() -> list[str]:
    """Addresses on which this process and those that it started listen."""
    import psutil

    ours = psutil.Process()
    return [
        str(connection.laddr.ip).removeprefix("::ffff:")
        for process in [ours, *ours.children(recursive=True)]
        for connection in process.net_connections("tcp")
        if connection.status == "LISTEN"
    ]


def ports(out: Path) -> dict[str, Any]:
    """What listens while the cluster runs that --ray starts."""
    with connected(LOCAL, cpus=1):
        return {"open": listening()}


def node(out: Path) -> dict[str, Any]:
    """Twelve cells of four stacks; when one of them has two rounds, the node that trains it is killed."""
    grid = {"method.name": ["fedavg", "ditto", "fedper", "lg-fedavg"], "seed": [0, 1, 2]}
    given = {**table("ditto", rounds=ROUNDS), "sweep": grid}
    cells = [(label, make_config(one)) for label, one in expand(given)]
    said, killed, open_ports = list[str](), list[int](), list[str]()
    with cluster(1, 1) as (made, nodes):

        def moved(experiment: Any) -> None:
            if experiment.committed >= 2 and experiment.finished is None and not killed:
                killed.append(experiment.committed)
                open_ports.extend(listening())
                made.remove_node(nodes[0], allow_graceful=False)

        watch = RunCallbacks(say=said.append, moved=moved)
        statuses = sweep(cells, out, watch, launcher=OnRay(made.address, 0.5))
    return {"said": said, "killed": killed, "open": open_ports, "status": [s.status for s in statuses]}


def samples(out: Path) -> dict[str, Any]:
    """Data that exists only in this process, and a method that exists only in a file here."""
    draw = np.random.default_rng(0)
    data = [(draw.normal(size=(30, 6)).astype("float32"), draw.integers(0, 3, 30)) for _ in range(4)]
    plugin = out.parent / "mine.py"
    plugin.write_text(
        "from holdfast.core.registry import register\n"
        "from holdfast.methods.fedavg import FedAvg\n"
        "@register('method', 'fedavg-elsewhere')\n"
        "class Elsewhere(FedAvg):\n"
        "    '''FedAvg under another name.'''\n"
    )
    holdfast.load_plugin(plugin)
    about: dict[str, Any] = {
        "method": ["fedavg-elsewhere", "ditto"],
        "seed": [0, 1],
        "data": holdfast.Data(clients=data, keep="1B"),
        "train": {"rounds": 3, "local_epochs": 1},
        "engine": {"plan": "loop", "threads": 1, "workers": 1},
        "progress": False,
    }
    holdfast.sweep(out=out / "one", **about)
    with cluster(1) as (made, _):
        found = holdfast.sweep(out=out / "ray", ray=made.address, **about)
    manifest = json.loads((found[0].run.path / "manifest.json").read_text()) if found[0].run else {}
    return {"status": [cell.status for cell in found], "plugins": manifest.get("plugins")}


ROUNDS = 24

if __name__ == "__main__":
    print(json.dumps({"ports": ports, "node": node, "samples": samples}[sys.argv[1]](Path(sys.argv[2]))))
