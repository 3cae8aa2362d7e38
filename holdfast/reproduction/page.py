"""The page of a reproduction: does the paper's claim hold, our figures beside the printed ones, what was
different."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from holdfast.core import toml
from holdfast.core.files import write_atomically
from holdfast.report.markup import Section, whole_page
from holdfast.report.table import to_markdown
from holdfast.report.table_exports import tex, to_latex
from holdfast.reproduction.charts import chart
from holdfast.reproduction.claims import ClaimResult
from holdfast.reproduction.experiments import changed
from holdfast.reproduction.outcome import Outcome
from holdfast.reproduction.result_table import Head, ResultTable, result_table, to_csv, to_table

_WHOLE = 95  # per cent of a dataset
_MANY = 7  # columns that fit on a usual screen only in small letters


def write_reproduction(outcome: Outcome) -> Path:
    """Page and tables, beside the runs; gives the page's path."""
    results, folder = result_table(outcome), outcome.path
    page = folder / "report.html"
    write_atomically(page, render(outcome, results).encode(errors="replace"))
    write_atomically(folder / "table.md", markdown(outcome, results).encode(errors="replace"))
    write_atomically(folder / "table.csv", to_csv(outcome, results).encode(errors="replace"))
    write_atomically(
        folder / "table.tex",
        f"% {tex(title(outcome))}\n{to_latex(to_table(results))}".encode(errors="replace"),
    )
    return page


def title(outcome: Outcome) -> str:
    study = outcome.study
    said = "; ".join([*(f"stand-in: {one}" for one in outcome.grid.substitutes), *_subsets(outcome)])
    return f"{study.paper}, {study.name}: {study.title}{said and f' ({said})'}"


def _subsets(outcome: Outcome) -> list[str]:
    """How much was used of what was not used whole; a sample or two that no client holds do not count."""
    shares: dict[str, list[float]] = {}
    for one in outcome.data:
        share = 100 * one["samples"] / one["of"]
        shares.setdefault(one["dataset"], []).append(round(share, 1 if share < 10 else None))
    spans = {name: (min(some), max(some)) for name, some in shares.items()}
    return [
        f"{low:g}{f' to {high:g}' if high > low else ''} % of {name}"
        for name, (low, high) in spans.items()
        if low < _WHOLE
    ]


def render(outcome: Outcome, results: ResultTable) -> str:
    """The whole page."""
    strong, verdict = _verdict(outcome)
    return whole_page(
        "reproduction.html",
        package="holdfast.reproduction",
        title=title(outcome),
        outcome=outcome,
        datasets=[
            (one["dataset"], f"{_who(one)}, {100 * one['samples'] / one['of']:.3g} % of its samples")
            for one in outcome.data
        ],
        experiments=len(outcome.grid.to_run()),
        kind=_kind(outcome),
        strong=strong,
        verdict=verdict,
        claims=[(ours, _listed(ours.wrong), printed) for ours, printed in outcome.claim_results],
        charts=chart_sections(outcome),
        command=command(outcome),
        changed=changed(outcome.study, outcome.grid.scale, outcome.grid.request.changes),
        footer=_origin(outcome),
        **_table(outcome, results),
    )


def chart_sections(outcome: Outcome) -> list[Section]:
    """The charts that the study asks for."""
    found = [chart(outcome, number, show) for number, show in enumerate(outcome.study.show)]
    return [section for section in found if section is not None]


def command(outcome: Outcome) -> str:
    request, (paper, _, what) = outcome.grid.request, outcome.study.key.partition("/")
    words = [f"holdfast reproduce {paper} {what} --scale {request.scale} --seeds {outcome.grid.seeds}"]
    words += [f"--variant {request.variant}"] if request.variant != "paper" else []
    words += ["--stand-ins"] if request.stand_ins else []
    words += [f"--only {quote(choice)}" for choice in request.only]
    words += [
        f"--set {quote(f'{key}={toml.value(value)}')}"
        for key, value in request.changes
        if key != "data.dir" and value is not None
    ]
    return " ".join(words)


def write_index(outcomes: Sequence[Outcome], folder: Path) -> Path:
    """What came out of each table and figure of a paper, with the way to its page."""
    request, paper = outcomes[0].grid.request, outcomes[0].study.paper
    rows = []
    for outcome in outcomes:
        judged = [ours.holds for ours, _ in outcome.claim_results if ours.holds is not None]
        words = f"{sum(judged)} of {len(judged)} claims hold" if judged else "nothing could be tested"
        about = f"{outcome.missing} experiments have no result" if outcome.missing else words
        link = (outcome.path / "report.html").relative_to(folder)
        rows.append((_kind(outcome), link, outcome.study, about))
    seeds = " or ".join(map(str, sorted({outcome.grid.seeds for outcome in outcomes})))
    content = whole_page(
        "index.html",
        package="holdfast.reproduction",
        title=f"{paper}, reproduced",
        facts=[("scale ", request.scale), ("seeds ", seeds)],
        rows=rows,
    )
    page = folder / f"index-{request.scale}.html"
    write_atomically(page, content.encode(errors="replace"))
    return page


def _who(one: dict[str, Any]) -> str:
    joined = f", {100 * one['participation']:g} % of them in a round" if one["participation"] < 1 else ""
    return f"{one['clients']} clients{joined}, {one['rounds']} rounds"


def _verdict(outcome: Outcome) -> tuple[str, str]:
    """The verdict on all claims: the words to stress, and the rest."""
    judged = [ours for ours, _ in outcome.claim_results if ours.holds is not None]
    if outcome.missing:
        return "Not complete", f": {outcome.missing} experiments have no result yet."
    if not judged:
        return "Nothing", " that the paper claims could be tested on this part of the table."
    held, untested = sum(bool(finding.holds) for finding in judged), len(outcome.claim_results) - len(judged)
    what = (
        "What could be tested"
        if untested
        else "All that the paper claims"
        if len(judged) > 1
        else "The paper's claim"
    )
    rest = f" {untested} of {len(outcome.claim_results)} claims could not be tested." if untested else ""
    if held == len(judged):
        return "Holds.", f" {what} holds here{_caution(outcome)}.{rest}"
    if not held:
        return "Does not hold.", f" {what} does not hold here{_caution(outcome)}.{rest}"
    claims = "tested claims" if untested else "claims"
    return "Holds in part:", f" {held} of {len(judged)} {claims} hold here{_caution(outcome)}.{rest}"


def _kind(outcome: Outcome) -> str:
    """How a verdict looks: open where something is missing or nothing could be tested."""
    judged = [ours.holds for ours, _ in outcome.claim_results if ours.holds is not None]
    return "open" if not judged or outcome.missing else "yes" if all(judged) else "no"


def _caution(outcome: Outcome) -> str:
    request, said = outcome.grid.request, []
    if request.scale == "smoke":
        return ", at a scale whose figures mean nothing"
    if request.scale != "full":
        said.append("at a smaller scale than the paper's")
    elif any(
        not key.startswith(("engine.", "data.dir")) for key, _ in request.changes
    ):  # how it is computed changes no figure
        said.append("with other settings than the paper's")
    if outcome.grid.seeds == 1:
        said.append("with one seed")
    return f", {' and '.join(said)}" if said else ""


def _listed(words: Sequence[str], most: int = 6) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def _table(outcome: Outcome, results: ResultTable) -> dict[str, Any]:
    """What the template needs for the table."""
    depth = len(results.columns[0]) if results.columns else 0
    names = len(results.rows[0]) if results.rows else 0
    rows, before = [], ("",) * names
    for row, in_row in zip(results.rows, results.cells, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(row, before, strict=True)) if a != b), len(row))
        rows.append(([label if level >= same else "" for level, label in enumerate(row)], in_row))
        before = row
    cells = [cell for row in results.cells for cell in row if cell is not None]
    legend = "Large: our result" + (
        ", mean ± standard deviation over seeds" if outcome.grid.seeds > 1 else ""
    )
    if outcome.study.printed:
        legend += "; small: the published number and the difference; ?: the published number is doubtful"
    legend += "; ★ best of the methods" if any(cell.best for cell in cells) else ""
    legend += "; d: diverged." if any(cell.diverged for cell in cells) else "."
    return {
        "legend": legend,
        "dense": max(map(len, results.cells), default=0) >= _MANY,
        "axes": results.axes,
        "corners": names,
        "heads": [_spans(results.columns, level) for level in range(depth)],
        "rows": rows,
    }


def _spans(columns: Sequence[Head], level: int) -> list[tuple[str, int]]:
    """One line of the head: neighbours that share a label share a cell. Labels and widths."""
    out, begin = [], 0
    for end in range(1, len(columns) + 1):
        if end == len(columns) or columns[end][: level + 1] != columns[begin][: level + 1]:
            out.append((columns[begin][level], end - begin))
            begin = end
    return out


def _origin(outcome: Outcome) -> str:
    finished = outcome.finished_runs
    if not finished:
        return "No experiment has finished yet."
    began = min(run.manifest["began"] for run in finished)
    devices = ", ".join(
        sorted({f"{run.manifest['device']}, plan {run.manifest['plan']['name']}" for run in finished})
    )
    return (
        f"Begun {began} with holdfast {finished[0].manifest['holdfast']}, PyTorch"
        f" {finished[0].manifest['torch']}, device {devices}."
    )


def markdown(outcome: Outcome, results: ResultTable) -> str:
    """For notes and docs: the table, the claims, the command."""
    lines = [f"### {title(outcome)}", "", f"`{command(outcome)}`", ""]
    for one in outcome.data:
        lines.append(f"{one['dataset']}: {_who(one)}, {one['samples']:,} of {one['of']:,} samples.  ")
    unit = "In brackets: the published number." if outcome.study.printed else ""
    lines += ["", to_markdown(to_table(results)), f"{unit} {_origin(outcome)}".strip(), ""]
    lines += [
        _claim_line(ours, printed, outcome.study.printed is not None)
        for ours, printed in outcome.claim_results
    ]
    return "\n".join(lines) + "\n"


def _claim_line(ours: ClaimResult, printed: ClaimResult, numbers: bool) -> str:
    print_too = f" (in print: {printed.words})" if numbers else ""
    return f"* {ours.claim.says}: **{ours.words}**{print_too}"
