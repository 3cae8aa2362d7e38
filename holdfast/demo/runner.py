"""The demonstration: `local`, `fedavg`, `ditto` and `fedcap` on heterogeneous clients, with and without
attackers, as one sweep; demo.toml holds its settings."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

from rich.table import Table

from holdfast.experiment.config import Config
from holdfast.experiment.config_tables import read_config
from holdfast.experiment.runner import RunCallbacks
from holdfast.report.page import write_page
from holdfast.report.read_runs import by_setting, read_records
from holdfast.report.table import narrowed, tabulate, to_rich
from holdfast.report.verdict import verdict
from holdfast.sweeps.grid import configs
from holdfast.sweeps.session import start

CONFIG = files("holdfast.demo") / "demo.toml"
TITLE = "Holdfast demo: which methods withstand an attack"

INTRODUCTION = """\
20 clients hold handwritten digits, each mostly of a few classes. Four methods train them, with and without an
attack: six of the clients send twenty times the opposite of what the others learned. With three seeds each,
all 24 runs train together:
  local    every client trains alone
  fedavg   one model for all clients
  ditto    a model for each client, pulled towards a shared one
  fedcap   a model for each client, mixed from similar clients; distant clients are banned"""


def cells() -> list[tuple[str, Config]]:
    with as_file(CONFIG) as file:
        return configs(read_config(file))


def run_demo(folder: Path, watch: RunCallbacks) -> Path:
    """Run all experiments, write the page and return its path."""
    start(cells(), folder, watch)
    return write_page(folder, title=TITLE, alone=True)


def summary(folder: Path, width: int) -> tuple[Table, str]:
    """Return the table, and what it says in words."""
    lines = by_setting(read_records(folder))
    return to_rich(narrowed(tabulate(lines), width)), " ".join(verdict(lines))
