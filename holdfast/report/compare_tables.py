"""A comparison as tables: for the terminal, for Markdown and for a page of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.files import write_atomically
from holdfast.core.version import __version__
from holdfast.report.compare import Comparison, by_seed, mean_of, spread_of
from holdfast.report.config_differences import in_short
from holdfast.report.markup import fill
from holdfast.report.numbers import amount, duration, percent, percent_and_spread, points
from holdfast.report.paired_tests import CONFIDENCE, Paired
from holdfast.report.table import (
    WORDS,
    Entry,
    Table,
    columns,
    tabulate,
    to_markdown,
)

_SHARES = (
    "accuracy",
    "validation/accuracy",
    "macro_f1",
    "balanced_accuracy",
    "auc",
    "attack/asr",
    "attack/lost",
    "detection",
    "matching",
)


@dataclass(frozen=True)
class Part:
    """One table of the comparison and a note about it."""

    title: str
    table: Table
    note: str = ""
    words: bool = False
    """Whether its cells are words rather than numbers."""


def parts(comparison: Comparison) -> list[Part]:
    out = [Part("Figures", _figures(comparison), _about_figures(comparison))]
    if comparison.differs:
        out.append(
            Part(
                "What differs",
                _differs(comparison),
                "Only the settings that are not the same for all.",
                words=True,
            )
        )
    if any(pair.over_seeds is not None and pair.over_seeds.low is not None for pair in comparison.pairs):
        out.append(
            Part(f"{comparison.metric}, paired over seeds", _over_seeds(comparison), _about_seeds(comparison))
        )
    if any(pair.over_clients is not None for pair in comparison.pairs):
        out.append(
            Part("Accuracy, paired over the clients of one seed", _over_clients(comparison), _ABOUT_CLIENTS)
        )
    return out


_ABOUT_CLIENTS = (
    "In the row 'A − B', better counts the clients that A serves better than B. This is about clients, not"
    " about seeds: whether the two settings serve these clients differently in this one draw of data and"
    " start. It says nothing about what another seed would give. Signed-rank test, two-sided; Holm over the"
    " pairs of this table."
)


def _about_figures(comparison: Comparison) -> str:
    spread = (
        "± is the standard deviation over seeds. " if any(line.seeds > 1 for line in comparison.lines) else ""
    )
    return (
        f"{spread}The difference is the row's mean {comparison.metric} less that of"
        f" {comparison.reference.label}, over finished runs."
    )


def _about_seeds(comparison: Comparison) -> str:
    which = "all pairs" if comparison.all_pairs else f"the pairs with {comparison.reference.label}"
    return (
        "The row 'A − B' has the difference of A less B under the same seed: its mean with the"
        f" {100 * CONFIDENCE:g} % interval, p of the paired t-test and of Wilcoxon's signed-rank test, both"
        f" two-sided, and after Holm's correction over {which}."
    )


def _figures(comparison: Comparison) -> Table:
    """The report's table with the metric, where it is not in it, the number of seeds and the difference.
    These columns are beside the metric, because the table is wider than most screens."""
    lines, metric = comparison.lines, comparison.metric
    table = tabulate(lines)
    values = [by_seed(line, metric) for line in lines]
    told: list[tuple[str, list[str]]] = [("seeds", [str(line.seeds) for line in lines])]
    shown = [column.metrics for column in columns(lines)]
    if (metric,) not in shown:
        told.append((metric, [_mean_and_spread(metric, mean_of(v), spread_of(v)) for v in values]))
    differences = [comparison.difference(line) for line in lines]
    told.append(("difference", ["–" if d is None else signed(metric, d) for d in differences]))
    place = shown.index((metric,)) + 2 if (metric,) in shown else 1
    titles = (*table.titles[:place], *(title for title, _ in told), *table.titles[place:])
    rows = [
        (*row[:place], *(Entry(texts[i]) for _, texts in told), *row[place:])
        for i, row in enumerate(table.rows)
    ]
    return Table(titles, tuple(rows))


def _differs(comparison: Comparison) -> Table:
    keys = list(comparison.differs)
    texts = [[in_short(value) for value in values] for values in comparison.differs.values()]
    rows = [
        (Entry(line.label), *(Entry(column[place]) for column in texts))
        for place, line in enumerate(comparison.lines)
    ]
    return Table(("", *keys), tuple(rows))


def _over_seeds(comparison: Comparison) -> Table:
    rows, metric = [], comparison.metric
    for place, pair in enumerate(comparison.pairs):
        test = pair.over_seeds
        if test is None or test.low is None:
            said = "no test: " + (
                f"{len(pair.seeds)} seeds shared" if len(pair.seeds) != 1 else "1 seed shared"
            )
            rows.append((Entry(pair.label), Entry(str(len(pair.seeds))), Entry(said), *[Entry("–")] * 5))
            continue
        adjusted = comparison.corrected
        told = (pair.label, str(test.pairs), signed(metric, test.mean), _interval(metric, test))
        rows.append(
            (
                *map(Entry, told),
                *map(_p, (test.t, adjusted.t[place], test.wilcoxon, adjusted.wilcoxon[place])),
            )
        )
    titles = (
        "",
        "seeds",
        "difference",
        f"{100 * CONFIDENCE:g} % interval",
        "t-test",
        "Holm",
        "signed-rank",
        "Holm",
    )
    return Table(titles, tuple(rows))


def _over_clients(comparison: Comparison) -> Table:
    rows = []
    for place, pair in enumerate(comparison.pairs):
        test = pair.over_clients
        if test is not None:
            counts = (
                str(pair.seed),
                str(test.pairs),
                str(pair.better),
                str(pair.worse),
                signed("accuracy", test.mean),
            )
            rows.append(
                (
                    Entry(pair.label),
                    *map(Entry, counts),
                    _p(test.wilcoxon),
                    _p(comparison.corrected.clients[place]),
                )
            )
    return Table(
        ("", "of seed", "clients", "better", "worse", "difference", "signed-rank", "Holm"), tuple(rows)
    )


def writer(metric: str) -> Callable[[float], str]:
    """The function that writes a figure of this name."""
    if metric.startswith(_SHARES) and not metric.endswith("/clients"):
        return percent
    return (
        amount
        if metric.startswith("bytes/")
        else duration
        if metric.startswith("seconds/")
        else "{:,.4g}".format
    )


def signed(metric: str, difference: float) -> str:
    """A difference with its sign; of shares in percentage points."""
    write = writer(metric)
    if write is percent:
        return points(difference)
    text = write(abs(difference))
    return text if text == write(0.0) else ("−" if difference < 0 else "+") + text


def _interval(metric: str, test: Paired) -> str:
    assert test.low is not None and test.high is not None
    return " to ".join(signed(metric, end).removesuffix(" points") for end in (test.low, test.high))


def _mean_and_spread(metric: str, mean: float | None, spread: float | None) -> str:
    if mean is None:
        return "–"
    write = writer(metric)
    if write is percent:
        return percent_and_spread(mean, spread)
    return write(mean) if spread is None else f"{write(mean)} ± {write(spread)}"


def _p(value: float | None) -> Entry:
    return Entry("–" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}", value)


def as_markdown(comparison: Comparison) -> str:
    sections = [
        f"### {part.title}\n\n{to_markdown(part.table)}" + (f"\n{part.note}\n" if part.note else "")
        for part in parts(comparison)
    ]
    notes = "".join(f"* {note}\n" for note in comparison.notes)
    return "\n".join([*sections, *([notes] if notes else [])])


def write_compare_page(comparison: Comparison, path: Path) -> None:
    """Write the comparison as a page."""
    labels = [line.label for line in comparison.lines]
    page = fill(
        "compare.html",
        title=" and ".join(labels) if len(labels) <= 3 else f"{len(labels)} settings side by side",
        comparison=comparison,
        parts=parts(comparison),
        words=WORDS,
        footer=f"Page by holdfast {__version__}.",
    )
    write_atomically(path, page.encode(errors="replace"))
