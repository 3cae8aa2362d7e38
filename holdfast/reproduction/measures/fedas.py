"""Measures of FedAS's tables and figures. Its accuracy is pooled: correct answers over the test samples of
all clients."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pandas as pd

from holdfast.diagnostics.fisher import most_informative_replaced
from holdfast.reproduction.measures.base import measure
from holdfast.results.run import Run


def _pooled(run: Run) -> pd.Series:
    return run.metrics["accuracy/pooled"].dropna().astype(float)


@measure("pooled/best")
def best(run: Run) -> float | None:
    """The best pooled accuracy of any round, which is what the paper's tables print."""
    found = _pooled(run)
    return float(found.max()) if len(found) else None


@measure("pooled/over-rounds")
def over_rounds(run: Run) -> float | None:
    """The mean pooled accuracy of all rounds: of two methods that end alike, the faster one has more (Fig.
    5)."""
    found = _pooled(run)
    return float(found.mean()) if len(found) else None


@lru_cache(maxsize=4)
def _replaced(path: Path) -> pd.Series:
    """Fig. 3a, pooled; five metrics use one measurement."""
    frame = most_informative_replaced(Run(path), share=0.05).query("samples > 0")
    return pooled(frame)


def pooled(frame: pd.DataFrame) -> pd.Series:
    """Accuracies of clients as one of all their samples."""
    names = ["before", "top", "random"]
    return frame[names].mul(frame["samples"], axis=0).sum() / frame["samples"].sum()


@measure("top-fim/before")
def before(run: Run) -> float | None:
    """Accuracy as trained."""
    return float(_replaced(run.path)["before"])


@measure("top-fim/top")
def top(run: Run) -> float | None:
    """Accuracy after the 5 % of parameters with the most Fisher information are those of a fresh network."""
    return float(_replaced(run.path)["top"])


@measure("top-fim/random")
def random(run: Run) -> float | None:
    """Accuracy after 5 % of the parameters, drawn at random, are those of a fresh network."""
    return float(_replaced(run.path)["random"])


@measure("top-fim/lost-top")
def lost_top(run: Run) -> float | None:
    """What replacing the most informative parameters costs."""
    return float(_replaced(run.path)["before"] - _replaced(run.path)["top"])


@measure("top-fim/lost-random")
def lost_random(run: Run) -> float | None:
    """What replacing as many parameters at random costs."""
    return float(_replaced(run.path)["before"] - _replaced(run.path)["random"])


def _traces(run: Run) -> pd.Series:
    """Mean over the clients of each round."""
    return run.table("fim").groupby("round")["value"].mean()


@measure("fim/first")
def fim_first(run: Run) -> float | None:
    """Trace of the Fisher information after the first round, mean over the clients."""
    return float(_traces(run).iloc[0])


@measure("fim/last")
def fim_last(run: Run) -> float | None:
    """Trace of the Fisher information after the last round, mean over the clients."""
    return float(_traces(run).iloc[-1])


@measure("fim/growth")
def fim_growth(run: Run) -> float | None:
    """How many times the first round's trace the last round's is."""
    traces = _traces(run)
    return float(traces.iloc[-1] / traces.iloc[0]) if traces.iloc[0] else None


def weights_by_presence(alpha: pd.DataFrame) -> tuple[float, float] | None:
    """Return the mean weight of clients that are present in more than half of the rounds, and of the
    stragglers, over the rounds that have both."""
    often = alpha.groupby("client")["round"].nunique() > alpha["round"].nunique() / 2
    rows = alpha.assign(often=alpha["client"].map(often))
    both = rows.groupby("round")["often"].transform("nunique") == 2
    means = rows[both].groupby("often")["value"].mean()
    return (float(means[True]), float(means[False])) if len(means) == 2 else None


@measure("weight/online")
def weight_online(run: Run) -> float | None:
    """Mean weight of a client that is present in more than half of the rounds, in rounds that have stragglers
    too."""
    found = weights_by_presence(run.table("alpha"))
    return found and found[0]


@measure("weight/stragglers")
def weight_stragglers(run: Run) -> float | None:
    """Mean weight of a straggler, a client that is present in at most half of the rounds."""
    found = weights_by_presence(run.table("alpha"))
    return found and found[1]


@measure("weight/ratio")
def weight_ratio(run: Run) -> float | None:
    """A straggler's mean weight over that of a client that is mostly present."""
    found = weights_by_presence(run.table("alpha"))
    return found[1] / found[0] if found and found[0] else None
