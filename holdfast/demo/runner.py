"""The demonstration: `local`, `fedavg`, `ditto` and `fedcap` on unlike clients, all honest and with liars
among them, played as one sweep; demo.toml holds its settings."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

from rich.table import Table

from holdfast.experiment.config import Config, read_config
from holdfast.experiment.runner import Watch
from holdfast.report.page import write_page
from holdfast.report.read_runs import by_setting, read_cells
from holdfast.report.sections import verdict
from holdfast.report.table import narrowed, tabulate, to_rich
from holdfast.sweeps.grid import configs
from holdfast.sweeps.session import start

CONFIG = files("holdfast.demo") / "demo.toml"
TITLE = "Holdfast demo: who falls under attack, and who holds"

INTRODUCTION = """\
20 clients hold handwritten digits, each mostly of a few classes. Four ways to train them, with and without six of them sending twenty
times the opposite of what the others learned, three seeds each, all 24 runs at once:
  local    every client alone
  fedavg   one model for all
  ditto    a model for each client, pulled towards a shared one
  fedcap   a model for each client, made of those of clients like it; whoever is too far off is banned"""  # noqa: E501


def cells() -> list[tuple[str, Config]]:
    with as_file(CONFIG) as file:
        return configs(read_config(file))


def run_demo(folder: Path, watch: Watch) -> Path:
    """Run everything and write the page; gives its path."""
    start(cells(), folder, watch)
    return write_page(folder, title=TITLE, alone=True)


def summary(folder: Path, width: int) -> tuple[Table, str]:
    """The table, and what it says in words."""
    lines = by_setting(read_cells(folder))
    return to_rich(narrowed(tabulate(lines), width)), " ".join(verdict(lines))
