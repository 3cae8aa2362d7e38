"""A run as Python holds it: what is read from its folder, and pictures, a page and files made of it."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from holdfast.data.federation import load_samples
from holdfast.evaluation.glossary import explain
from holdfast.interactive.export import export_run
from holdfast.interactive.figure import check_metric, curve_figure
from holdfast.interactive.normalisation import Normalisation
from holdfast.interactive.notebook import facts_table
from holdfast.report.page import write_page
from holdfast.results import run as saved
from holdfast.results.run import name_of
from holdfast.storage.status import RunStatus, run_status

INNER = (
    "data_config",
    "declared_tables",
    "delivered",
    "module",
    "new_client_id",
    "parameters_of",
    "parts_config",
    "server_state",
    "vector",
)  # of Run: what only the library and results of methods use


class Run(saved.Run):
    """One run on disk, finished or not.

    >>> run = holdfast.run(method="ditto", train={"rounds": 3})
    >>> run.status, run.final["accuracy"]
    >>> run.metrics[["round", "accuracy"]]       # one row per round
    >>> run.clients()                            # one row per client, after the last round
    >>> run.model(client=7)                      # a torch module
    >>> run.plot()                               # a matplotlib figure

    `holdfast.Run(path)` opens a run again; so does `holdfast.open(path)`. Reading needs no lock: committed
    files do not change."""

    def __dir__(self) -> list[str]:
        """Without what only the library and results of methods use."""
        return [name for name in super().__dir__() if name not in INNER]

    @property
    def status(self) -> str:
        """In one word: not begun, begun, finished, diverged or failed.

        >>> holdfast.open("runs/first").status
        'finished'"""
        return self._run_status.status

    @property
    def _run_status(self) -> RunStatus:
        return run_status(self.path, self.manifest["label"])

    def __repr__(self) -> str:
        about = self._about()
        said = [
            f"{about['method']} on {about['data']}",
            f"{about['clients']} clients",
            f"round {about['rounds']}",
            about["status"],
            *([f"accuracy {about['accuracy']}"] if "accuracy" in about else []),
        ]
        return f"Run({', '.join(said)}: {self.path})"

    def _repr_html_(self) -> str:
        """For notebooks."""
        return facts_table(self._about() | {"folder": self.path})

    def _about(self) -> dict[str, str]:
        config, accuracy = self.manifest["config"], self.accuracy
        parts = [name_of(config[kind]) for kind in ("method", "aggregator")]
        about = {
            "method": " with ".join(filter(None, parts)),
            "data": str(config["data"]["name"]),
            "attack": name_of(config["attack"]) or "none",
            "clients": str(self.manifest.get("clients", "?")),
            "rounds": f"{self.round} of {config['train']['rounds']}",
            "status": "not finished" if self.status == "begun" else self._run_status.words,
        }
        return about if accuracy is None else about | {"accuracy": f"{accuracy:.4f}"}

    @property
    def accuracy(self) -> float | None:
        """The headline accuracy, in [0, 1]; of an unfinished run that of its last evaluation. None before
        the first."""
        result = self.store.result()
        if result is not None:
            return result["final"].get("accuracy")
        seen = [part["metrics"].get("accuracy") for part in self.store.parts(self.round)]
        return next((value for value in reversed(seen) if value is not None), None)

    @property
    def columns(self) -> dict[str, str]:
        """What the columns of `metrics` mean.

        >>> run.columns["accuracy/worst10"]
        'mean over the tenth of the clients with the lowest accuracy'"""
        return {str(name): explain(str(name)) or "" for name in self.metrics.columns}

    def plot(self, metric: str | Sequence[str] = "accuracy") -> Any:
        """Draw one or several columns of `metrics` over the rounds, and return a matplotlib Figure.

        >>> run.plot().savefig("accuracy.pdf")
        >>> run.plot(["accuracy/global", "accuracy/personal"])

        A notebook shows the figure. matplotlib comes with `pip install 'holdfast[figures]'`."""
        asked, frame = [metric] if isinstance(metric, str) else list(metric), self.metrics
        lines = []
        for name in asked:
            check_metric(name, [column for column in frame.columns if column != "round"])
            points = frame[["round", name]].dropna().astype(float).itertuples(index=False)
            label = name_of(self.manifest["config"]["method"]) if len(asked) == 1 else name
            lines.append((str(label), [(int(round), value, value, value) for round, value in points]))
        return curve_figure(lines, asked[0] if len(asked) == 1 else asked[0].partition("/")[0], asked)

    @cached_property
    def _normalisation(self) -> Normalisation:
        samples = load_samples(self.data_config.data)
        return Normalisation(self.data_config.data, samples, self.manifest["config"]["train"].get("dtype"))

    def normalise(self, X: Any) -> Tensor:
        """Do to new samples what training did to the run's own, and return them as a model takes them.

        >>> run.model(client=7)(run.normalise(X)).softmax(1)

        X are samples of the run's shape, one or many, as an array or a tensor: bytes where the run had bytes,
        and not yet normalised. Mean and deviation are in normalisation.json of an `export`. Texts and tables
        are encoded in other ways and are refused."""
        return self._normalisation(X)

    def report(self, open: bool = False) -> Path:
        """Write the page about this run, report.html in its folder, and return its path; `open` shows it in
        a browser.

        >>> run.report(open=True)
        PosixPath('runs/first/report.html')"""
        return _opened(write_page(self.path), open)

    def export(self, folder: str | Path, clients: Sequence[int | str] | None = None) -> Path:
        """Write what other programs read into a new or an empty folder, and return the folder.

        >>> run.export("for-the-paper")
        >>> run.export("two-models", clients=[0, 7])

        It gets config.toml, normalisation.json (mean and deviation), metrics.csv and metrics.parquet (the
        columns of `metrics`), clients.csv (of `clients()`), final.json, and models/ with safetensors files
        by the names of the module's tensors: global.safetensors, where the method has a global model, and
        client-7.safetensors (client-7-York.safetensors, if its name is York) for each of `clients`; by
        default all, where the method makes a model for each client."""
        return export_run(self, Path(folder), clients)


def _opened(page: Path, wanted: bool) -> Path:
    if wanted:
        webbrowser.open(page.resolve().as_uri())
    return page
