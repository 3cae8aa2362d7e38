"""The page of a reproduction: does the paper's claim hold, our figures beside the printed ones, what was
different."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from shlex import quote
from typing import Any

from holdfast.core import toml
from holdfast.core.files import write_atomically
from holdfast.report.page import document, header
from holdfast.report.table import to_markdown
from holdfast.report.table_exports import tex, to_latex
from holdfast.reproduction.charts import chart
from holdfast.reproduction.claims import Finding
from holdfast.reproduction.experiments import changed
from holdfast.reproduction.outcome import Outcome
from holdfast.reproduction.sheet import Box, Head, Sheet, sheet_of, to_csv, to_table

_WHOLE = 95  # per cent of a dataset
_MANY = 7  # columns that fit on a usual screen only in small letters


def write_reproduction(outcome: Outcome) -> Path:
    """Page and tables, beside the runs; gives the page's path."""
    sheet, folder = sheet_of(outcome), outcome.path
    page = folder / "report.html"
    write_atomically(page, render(outcome, sheet).encode(errors="replace"))
    write_atomically(folder / "table.md", markdown(outcome, sheet).encode(errors="replace"))
    write_atomically(folder / "table.csv", to_csv(outcome, sheet).encode(errors="replace"))
    write_atomically(
        folder / "table.tex", f"% {tex(title(outcome))}\n{to_latex(to_table(sheet))}".encode(errors="replace")
    )
    return page


def title(outcome: Outcome) -> str:
    study = outcome.study
    said = "; ".join([*(f"stand-in: {one}" for one in outcome.grid.substitutes), *_subsets(outcome)])
    return f"{study.paper}, {study.name}: {study.title}{said and f' ({said})'}"


def _subsets(outcome: Outcome) -> list[str]:
    """How much was used of what was not used whole; a sample or two that no client was dealt do not count."""
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


def render(outcome: Outcome, sheet: Sheet) -> str:
    body = [
        _style(),
        header("reproduction", title(outcome), _facts(outcome)),
        f'<p class="verdict {_kind(outcome)}">{_verdict(outcome)}</p>',
        _claims(outcome),
        _table(outcome, sheet),
        *(chart(outcome, number, show) for number, show in enumerate(outcome.study.show)),
        _notes(outcome),
        (
            f'<section><h2>Play it again</h2><pre>{escape(command(outcome))}</pre><p class="note">The'
            " experiments themselves are in the folder <code>runs</code> beside this page, for"
            " <code>holdfast report</code> and <code>holdfast diagnose</code>.</p></section>"
        ),
        f"<footer>{escape(_origin(outcome))}</footer>",
    ]
    return document(title(outcome), body)


def command(outcome: Outcome) -> str:
    wanted, (paper, _, what) = outcome.grid.wanted, outcome.study.key.partition("/")
    words = [f"holdfast reproduce {paper} {what} --scale {wanted.scale} --seeds {outcome.grid.seeds}"]
    words += [f"--variant {wanted.variant}"] if wanted.variant != "paper" else []
    words += ["--stand-ins"] if wanted.stand_ins else []
    words += [f"--only {quote(choice)}" for choice in wanted.only]
    words += [
        f"--set {quote(f'{key}={toml.value(value)}')}"
        for key, value in wanted.changes
        if key != "data.dir" and value is not None
    ]
    return " ".join(words)


def write_index(outcomes: Sequence[Outcome], folder: Path) -> Path:
    """What came out of each table and figure of a paper, with the way to its page."""
    paper = outcomes[0].study.paper
    rows = []
    for outcome in outcomes:
        judged = [ours.holds for ours, _ in outcome.findings if ours.holds is not None]
        words = f"{sum(judged)} of {len(judged)} claims hold" if judged else "nothing could be tested"
        link = escape(str((outcome.path / "report.html").relative_to(folder)), quote=True)
        about = f"{outcome.missing} experiments have no result" if outcome.missing else words
        rows.append(
            f'<tr class="{_kind(outcome)}"><th scope="row"><a'
            f' href="{link}">{escape(outcome.study.name)}</a></th><td>{about}</td>'
            f"<td>{escape(outcome.study.title)}</td></tr>"
        )
    wanted = outcomes[0].grid.wanted
    seeds = " or ".join(map(str, sorted({outcome.grid.seeds for outcome in outcomes})))
    facts = f'<ul class="facts"><li>scale <b>{wanted.scale}</b></li><li>seeds <b>{seeds}</b></li></ul>'
    table = (
        '<section><div class="scroll"><table'
        f' class="words"><tbody>{"".join(rows)}</tbody></table></div></section>'
    )
    page, name = folder / f"index-{wanted.scale}.html", f"{paper}, played again"
    write_atomically(
        page, document(name, [_style(), header("reproduction", name, facts), table]).encode(errors="replace")
    )
    return page


def _style() -> str:
    return f"<style>{(files('holdfast.reproduction') / 'page.css').read_text()}</style>"


def _facts(outcome: Outcome) -> str:
    wanted = outcome.grid.wanted
    seeds = f"{outcome.grid.seeds} seeds" if outcome.grid.seeds > 1 else "one seed"
    rows = [
        f"scale <b>{wanted.scale}</b>",
        f"<b>{len(outcome.grid.to_run())}</b> experiments",
        f"<b>{seeds}</b>",
    ]
    for one in outcome.data:
        share = f"{100 * one['samples'] / one['of']:.3g} % of its samples"
        rows.append(f"<b>{escape(one['dataset'])}</b>: {_who(one)}, {share}")
    return '<ul class="facts">' + "".join(f"<li>{row}</li>" for row in rows) + "</ul>"


def _who(one: dict[str, Any]) -> str:
    joined = f", {100 * one['participation']:g} % of them in a round" if one["participation"] < 1 else ""
    return f"{one['clients']} clients{joined}, {one['rounds']} rounds"


def _verdict(outcome: Outcome) -> str:
    judged = [ours for ours, _ in outcome.findings if ours.holds is not None]
    if outcome.missing:
        return f"<strong>Not complete</strong>: {outcome.missing} experiments have no result yet."
    if not judged:
        return "<strong>Nothing</strong> of what the paper says could be tested on this part of the table."
    held, untested = sum(bool(finding.holds) for finding in judged), len(outcome.findings) - len(judged)
    what = (
        "What could be tested of what the paper says"
        if untested
        else "What the paper says"
        if len(judged) > 1
        else "The paper's claim"
    )
    rest = f" {untested} of {len(outcome.findings)} claims could not be tested." if untested else ""
    if held == len(judged):
        return f"<strong>Holds.</strong> {what} is so here{_caution(outcome)}.{rest}"
    if not held:
        return f"<strong>Does not hold.</strong> {what} is not so here{_caution(outcome)}.{rest}"
    claims = "tested claims" if untested else "claims"
    return (
        f"<strong>Holds in part:</strong> {held} of {len(judged)} {claims} are so"
        f" here{_caution(outcome)}.{rest}"
    )


def _kind(outcome: Outcome) -> str:
    """How a verdict looks: open where something is missing or nothing could be tested."""
    judged = [ours.holds for ours, _ in outcome.findings if ours.holds is not None]
    return "open" if not judged or outcome.missing else "yes" if all(judged) else "no"


def _caution(outcome: Outcome) -> str:
    wanted, said = outcome.grid.wanted, []
    if wanted.scale == "smoke":
        return ", at a scale whose figures mean nothing"
    if wanted.scale != "full":
        said.append("at a smaller scale than the paper's")
    elif any(
        not key.startswith(("engine.", "data.dir")) for key, _ in wanted.changes
    ):  # how it is computed changes no figure
        said.append("with other settings than the paper's")
    if outcome.grid.seeds == 1:
        said.append("with one seed")
    return f", {' and '.join(said)}" if said else ""


def _claims(outcome: Outcome) -> str:
    rows = []
    for ours, printed in outcome.findings:
        kind = {True: "yes", False: "no", None: "open"}[ours.holds]
        mark = {True: "✓", False: "✗", None: "–"}[ours.holds]
        where = f'<div class="note">not so: {escape(_listed(ours.wrong))}</div>' if ours.wrong else ""
        rows.append(
            f'<tr class="{kind}"><th scope="row">{escape(ours.claim.says)}{where}</th><td>{mark}'
            f" {escape(ours.words)}</td>"
            f"<td>{escape(printed.words) if outcome.study.printed else 'no numbers in print'}</td></tr>"
        )
    return (
        '<section><h2>What the paper says</h2><div class="scroll"><table'
        ' class="words"><thead><tr><th>claim</th><th>here</th>'
        f"<th>in the printed numbers</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _listed(words: Sequence[str], most: int = 6) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def _table(outcome: Outcome, sheet: Sheet) -> str:
    depth = len(sheet.columns[0]) if sheet.columns else 0
    names = len(sheet.rows[0]) if sheet.rows else 0
    corners = ["<th></th>" * names] * (depth - 1) + [
        "".join(f"<th>{escape(axis)}</th>" for axis in sheet.axes)
    ]
    head = "".join(f"<tr>{corner}{_spans(sheet.columns, level)}</tr>" for level, corner in enumerate(corners))
    lines, before = [], ("",) * names
    for row, boxes in zip(sheet.rows, sheet.boxes, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(row, before, strict=True)) if a != b), len(row))
        said = "".join(
            f'<th scope="row">{escape(label) if level >= same else ""}</th>'
            for level, label in enumerate(row)
        )
        lines.append(f"<tr>{said}{''.join(_cell(box) for box in boxes)}</tr>")
        before = row
    legend = "Large: ours" + (", mean ± standard deviation over seeds" if outcome.grid.seeds > 1 else "")
    if outcome.study.printed:
        legend += "; small: printed, and the difference; ? where the print is doubtful"
    legend += (
        "; ★ best of the methods"
        if any(box is not None and box.best for row in sheet.boxes for box in row)
        else ""
    )
    legend += (
        "; d: diverged."
        if any(box is not None and box.diverged for row in sheet.boxes for box in row)
        else "."
    )
    kind = "sheet dense" if max(map(len, sheet.boxes), default=0) >= _MANY else "sheet"
    return (
        f'<section><h2>{escape(outcome.study.name)}</h2><p class="note">{legend}</p><div class="scroll">'
        f'<table class="{kind}"><thead>{head}</thead><tbody>{"".join(lines)}</tbody></table></div></section>'
    )


def _spans(columns: Sequence[Head], level: int) -> str:
    """One line of the head: neighbours that share a label share a cell."""
    out, begin = [], 0
    for end in range(1, len(columns) + 1):
        if end == len(columns) or columns[end][: level + 1] != columns[begin][: level + 1]:
            span = f' colspan="{end - begin}"' if end - begin > 1 else ""
            out.append(f'<th scope="colgroup"{span}>{escape(columns[begin][level])}</th>')
            begin = end
    return "".join(out)


def _cell(box: Box | None) -> str:
    if box is None:
        return "<td></td>"
    said = ""
    if box.printed is not None:
        gap = f" ({box.difference:+.{box.digits}f})" if box.difference is not None else ""
        said = f'<div class="printed">{escape(box.printed_text)}{gap}</div>'
    notes = "; ".join(filter(None, (value.note for value in (box.ours, box.printed) if value is not None)))
    about = f' title="{escape(notes)}"' if notes else ""
    return f'<td class="{"best" if box.best else "plain"}"{about}><span>{escape(box.text)}</span>{said}</td>'


def _notes(outcome: Outcome) -> str:
    grid, items = outcome.grid, [escape(note) for note in outcome.study.notes]
    if grid.substitutes:
        items.append(
            f"Stand-ins: {escape('; '.join(grid.substitutes))}. Figures are not to be compared with the"
            " printed ones."
        )
    if told := changed(outcome.study, grid.scale, grid.wanted.changes):
        items.append(f"Other than the paper's setting, in all cells: {escape('; '.join(told))}.")
    if outcome.study.variants and grid.wanted.variant != "both":
        other = "the released code" if grid.wanted.variant == "paper" else "the text of the paper"
        items.append(
            "Paper and released code differ in what may decide this result; <code>--variant both</code>"
            f" plays {other} too."
        )
    listed = "".join(f"<li>{item}</li>" for item in items)
    return f'<section><h2>To be kept in mind</h2><ul class="notes">{listed}</ul></section>' if items else ""


def _origin(outcome: Outcome) -> str:
    played = outcome.played
    if not played:
        return "Nothing was played to its end yet."
    began = min(run.manifest["began"] for run in played)
    devices = ", ".join(
        sorted({f"{run.manifest['device']}, plan {run.manifest['plan']['name']}" for run in played})
    )
    return (
        f"Begun {began} with holdfast {played[0].manifest['holdfast']}, PyTorch"
        f" {played[0].manifest['torch']}, device {devices}."
    )


def markdown(outcome: Outcome, sheet: Sheet) -> str:
    """For notes and docs: the table, the claims, the command."""
    lines = [f"### {title(outcome)}", "", f"`{command(outcome)}`", ""]
    for one in outcome.data:
        lines.append(f"{one['dataset']}: {_who(one)}, {one['samples']:,} of {one['of']:,} samples.  ")
    unit = "In brackets: printed." if outcome.study.printed else ""
    lines += ["", to_markdown(to_table(sheet)), f"{unit} {_origin(outcome)}".strip(), ""]
    lines += [
        _claim_line(ours, printed, outcome.study.printed is not None) for ours, printed in outcome.findings
    ]
    return "\n".join(lines) + "\n"


def _claim_line(ours: Finding, printed: Finding, numbers: bool) -> str:
    print_too = f" (in print: {printed.words})" if numbers else ""
    return f"* {ours.claim.says}: **{ours.words}**{print_too}"
