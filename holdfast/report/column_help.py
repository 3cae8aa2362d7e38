"""What the columns of tables mean, for --explain."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.evaluation.glossary import explain
from holdfast.report.table import (
    ALWAYS,
    CHOSEN,
    COSTS,
    ON_REQUEST,
    PRIVATE,
    STATUS,
    UNDER_ATTACK,
    WITH_PEERS,
    Table,
)

OTHERS = {
    STATUS: "how far the run is; where it diverged or failed, the round and the reason",
    # holdfast tune
    "test accuracy": "accuracy of the chosen settings on test data",
    "validation": "accuracy of the chosen trial on the clients' validation data",
    "trials": "settings that were tried, of those that are possible",
    CHOSEN: "settings of the trial with the best validation accuracy",
    # holdfast compare
    "seeds": "seeds of the line; in a row A − B, those that both have",
    "difference": "mean of the row less that of the line compared with; in a row A − B, A less B",
    "95 % interval": "range of the true mean difference with 95 % confidence, by the t-distribution",
    "t-test": "p of the paired t-test, two-sided",
    "signed-rank": "p of Wilcoxon's signed-rank test, two-sided",
    "Holm": "the p before it, after Holm's correction for the number of pairs",
    "of seed": "seed whose clients are compared",
    "clients": "benign clients that both runs measured",
    "better": "clients that A serves better than B in a row A − B",
    "worse": "clients that A serves worse than B",
    # holdfast plan
    "group": "cells whose clients are trained as one computation",
    "cells": "experiments of the group",
    "models": "models that are trained in a round",
    "stack": "models that take a step together, in each process",
    "plan": "how clients are trained: one by one (loop) or as one batch (vmap), and the precision",
    "processes": "worker processes x threads of each",
    "client steps": "training steps of all clients in the whole run",
    "us/step": "microseconds of one client's step",
}
_COLUMNS = (*ALWAYS, *ON_REQUEST.values(), *UNDER_ATTACK, *WITH_PEERS, *PRIVATE, *COSTS)


def explanations(titles: Iterable[str]) -> list[tuple[str, str]]:
    """Title and explanation of each of these columns, once."""
    known = {column.title: column.help for column in _COLUMNS} | OTHERS
    named = dict.fromkeys(title for title in titles if title)
    return [(title, known.get(title) or explain(title) or "a setting of the config") for title in named]


def explained(tables: Iterable[Table]) -> list[tuple[str, str]]:
    """The same for all columns of some tables, and for the marks in their cells."""
    tables = list(tables)
    entries = [entry for table in tables for row in table.rows for entry in row]
    out = explanations(title for table in tables for title in table.titles)
    if any("±" in entry.text for entry in entries):
        out.append(("±", "standard deviation over seeds"))
    if any(entry.best for entry in entries):
        out.append(("bold", "the best among lines that faced the same attack on the same data"))
    return out
