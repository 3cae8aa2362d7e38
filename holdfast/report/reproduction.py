"""The page of a reproduction: does the paper's claim hold, our figures beside the printed ones, what was different."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from holdfast.files import write_atomically
from holdfast.report.along import along
from holdfast.report.charts import Axis, Series, curves, heat_map
from holdfast.report.exports import tex, to_latex
from holdfast.report.page import document, header
from holdfast.report.sheet import Box, Head, Sheet, sheet_of, to_csv, to_table
from holdfast.report.table import to_markdown
from holdfast.reproducing.cells import At, changed
from holdfast.reproducing.claims import Finding
from holdfast.reproducing.outcome import Outcome
from holdfast.reproducing.study import Show, as_labels, matches
from holdfast.reproducing.values import place
from holdfast.results import Run


def write_reproduction(outcome: Outcome) -> Path:
    """Page and tables, beside the runs; gives the page's path."""
    sheet, folder = sheet_of(outcome), outcome.path
    page = folder / "report.html"
    write_atomically(page, render(outcome, sheet).encode())
    write_atomically(folder / "table.md", markdown(outcome, sheet).encode())
    write_atomically(folder / "table.csv", to_csv(outcome, sheet).encode())
    write_atomically(folder / "table.tex", f"% {tex(title(outcome))}\n{to_latex(to_table(sheet))}".encode())
    return page


def title(outcome: Outcome) -> str:
    study = outcome.study
    instead = f" ({'; '.join(f'stand-in: {one}' for one in outcome.grid.substitutes)})" if outcome.grid.substitutes else ""
    return f"{study.paper}, {study.name}: {study.title}{instead}"


def render(outcome: Outcome, sheet: Sheet) -> str:
    body = [
        _style(),
        header("reproduction", title(outcome), _facts(outcome)),
        f'<p class="verdict">{_verdict(outcome)}</p>',
        _claims(outcome),
        _table(outcome, sheet),
        *(_chart(outcome, number, show) for number, show in enumerate(outcome.study.show)),
        _notes(outcome),
        f'<section><h2>Play it again</h2><pre>{escape(command(outcome))}</pre><p class="note">The experiments themselves are in the folder '
        "<code>runs</code> beside this page, for <code>holdfast report</code> and <code>holdfast diagnose</code>.</p></section>",
        f"<footer>{escape(_origin(outcome))}</footer>",
    ]
    return document(title(outcome), body)


def command(outcome: Outcome) -> str:
    wanted, (paper, _, what) = outcome.grid.wanted, outcome.study.key.partition("/")
    words = [f"holdfast reproduce {paper} {what} --scale {wanted.scale} --seeds {wanted.seeds}"]
    words += [f"--variant {wanted.variant}"] if wanted.variant != "card" else []
    words += ["--stand-ins"] if wanted.stand_ins else []
    words += [f"--only '{choice}'" for choice in wanted.only]
    words += [f"--set '{key}={value}'" for key, value in wanted.changes if key != "data.dir"]
    return " ".join(words)


def write_index(outcomes: Sequence[Outcome], folder: Path) -> Path:
    """What came out of each table and figure of a paper, with the way to its page."""
    paper = outcomes[0].study.paper
    rows = []
    for outcome in outcomes:
        judged = [ours.holds for ours, _ in outcome.findings if ours.holds is not None]
        kind = "open" if not judged or outcome.missing else "yes" if all(judged) else "no"
        words = f"{sum(judged)} of {len(judged)} claims hold" if judged else "nothing could be tested"
        link = escape(str((outcome.path / "report.html").relative_to(folder)), quote=True)
        about = f"{outcome.missing} experiments have no result" if outcome.missing else words
        rows.append(f'<tr class="{kind}"><th scope="row"><a href="{link}">{escape(outcome.study.name)}</a></th><td>{about}</td>'
                    f"<td>{escape(outcome.study.title)}</td></tr>")  # fmt: skip
    wanted = outcomes[0].grid.wanted
    facts = f'<ul class="facts"><li>scale <b>{wanted.scale}</b></li><li>seeds <b>{wanted.seeds}</b></li></ul>'
    table = f'<section><div class="scroll"><table class="words"><tbody>{"".join(rows)}</tbody></table></div></section>'
    page, name = folder / f"index-{wanted.scale}.html", f"{paper}, played again"
    write_atomically(page, document(name, [_style(), header("reproduction", name, facts), table]).encode())
    return page


def _style() -> str:
    return f"<style>{(files('holdfast.report') / 'reproduction.css').read_text()}</style>"


def _facts(outcome: Outcome) -> str:
    wanted = outcome.grid.wanted
    seeds = f"{wanted.seeds} seeds" if wanted.seeds > 1 else "one seed"
    rows = [f"scale <b>{wanted.scale}</b>", f"<b>{len(outcome.grid.to_play())}</b> experiments", f"<b>{seeds}</b>"]
    for one in outcome.data:
        share = f"{100 * one['samples'] / one['of']:.3g} % of its samples"
        joined = f", {100 * one['participation']:g} % of them in a round" if one["participation"] < 1 else ""
        rows.append(f"<b>{escape(one['dataset'])}</b>: {one['clients']} clients{joined}, {one['rounds']} rounds, {share}")
    return '<ul class="facts">' + "".join(f"<li>{row}</li>" for row in rows) + "</ul>"


def _verdict(outcome: Outcome) -> str:
    judged = [ours for ours, _ in outcome.findings if ours.holds is not None]
    if outcome.missing:
        return f"<strong>Not complete</strong>: {outcome.missing} experiments have no result yet."
    if not judged:
        return "<strong>Nothing</strong> of what the paper says could be tested on this part of the table."
    held = sum(bool(finding.holds) for finding in judged)
    what = "What the paper says" if len(judged) > 1 else "The paper's claim"
    if held == len(judged):
        return f"<strong>Holds.</strong> {what} is so here{_caution(outcome)}."
    if not held:
        return f"<strong>Does not hold.</strong> {what} is not so here{_caution(outcome)}."
    return f"<strong>Holds in part:</strong> {held} of {len(judged)} claims are so here{_caution(outcome)}."


def _caution(outcome: Outcome) -> str:
    wanted, said = outcome.grid.wanted, []
    if wanted.scale != "full":
        said.append("at a smaller scale than the paper's")
    if wanted.seeds == 1:
        said.append("with one seed")
    return f", {' and '.join(said)}" if said else ""


def _claims(outcome: Outcome) -> str:
    rows = []
    for ours, printed in outcome.findings:
        kind = {True: "yes", False: "no", None: "open"}[ours.holds]
        mark = {True: "✓", False: "✗", None: "–"}[ours.holds]
        where = f'<div class="note">not so: {escape(_listed(ours.wrong))}</div>' if ours.wrong else ""
        rows.append(
            f'<tr class="{kind}"><th scope="row">{escape(ours.claim.says)}{where}</th><td>{mark} {escape(ours.words)}</td>'
            f"<td>{escape(printed.words) if outcome.study.printed else 'no numbers in print'}</td></tr>"
        )
    return (
        '<section><h2>What the paper says</h2><div class="scroll"><table class="words"><thead><tr><th>claim</th><th>here</th>'
        f'<th>in the printed numbers</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div></section>'
    )


def _listed(words: Sequence[str], most: int = 6) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def _table(outcome: Outcome, sheet: Sheet) -> str:
    depth = len(sheet.columns[0]) if sheet.columns else 0
    names = len(sheet.rows[0]) if sheet.rows else 0
    corners = ["<th></th>" * names] * (depth - 1) + ["".join(f"<th>{escape(axis)}</th>" for axis in sheet.axes)]
    head = "".join(f"<tr>{corner}{_spans(sheet.columns, level)}</tr>" for level, corner in enumerate(corners))
    lines, before = [], ("",) * names
    for row, boxes in zip(sheet.rows, sheet.boxes, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(row, before, strict=True)) if a != b), len(row))
        said = "".join(f'<th scope="row">{escape(label) if level >= same else ""}</th>' for level, label in enumerate(row))
        lines.append(f"<tr>{said}{''.join(_cell(box) for box in boxes)}</tr>")
        before = row
    legend = "Large: ours" + (", mean ± standard deviation over seeds" if outcome.grid.wanted.seeds > 1 else "")
    if outcome.study.printed:
        legend += "; small: printed, and the difference; ? where the print is doubtful"
    legend += "; ★ best of the methods; d: diverged."
    return (
        f'<section><h2>{escape(outcome.study.name)}</h2><p class="note">{legend}</p><div class="scroll">'
        f"<table><thead>{head}</thead><tbody>{''.join(lines)}</tbody></table></div></section>"
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


def _chart(outcome: Outcome, number: int, show: Show) -> str:
    """Nothing where no cell that it shows is played."""
    if not any(matches(show.where, cell.at) for cell in outcome.grid.cells):
        return ""
    draw = {"rounds": _over_rounds, "along": _along, "matrix": _matrix}[show.kind]
    return f"<section>{draw(outcome, number, show)}</section>"


def _over_rounds(outcome: Outcome, number: int, show: Show) -> str:
    series = []
    for at, runs in _groups(outcome, show):
        played = [_by_round(run, show.figure) for run in runs]
        for kind in dict.fromkeys(kind for one in played for kind in one):
            found = [one.get(kind, {}) for one in played]
            rounds = sorted(set.intersection(*map(set, found)))
            points = [(r, statistics.fmean(c[r] for c in found), min(c[r] for c in found), max(c[r] for c in found)) for r in rounds]
            series.append(Series(f"{_name(outcome, at, _fixed(show))} {kind}".strip(), points))
    percent = show.figure.startswith("accuracy")
    every = [point for one in series for point in one.points]
    axis = Axis.over(every) if every and not percent else None
    return f"<h2>{escape(show.figure)} over the rounds{_of(show)}</h2>" + curves(series, f"{show.figure} {number}", percent, axis=axis)


def _by_round(run: Run, figure: str) -> dict[str, dict[int, float]]:
    """A figure of every round; or, of a recorded table, the median over benign and over malicious clients."""
    frame = run.metrics
    if figure in frame:
        return {"": {int(r): float(v) for r, v in zip(frame["round"], frame[figure], strict=True) if v == v}}
    if figure not in run.tables:
        return {}
    table = run.table(figure)
    table = table[table["value"] < float("inf")]
    kinds = {"benign": table[~table["malicious"]], "malicious": table[table["malicious"]]}
    return {kind: {int(r): float(v) for r, v in of.groupby("round")["value"].median().items()} for kind, of in kinds.items() if len(of)}


def _along(outcome: Outcome, number: int, show: Show) -> str:
    assert show.axis is not None
    metric, values = show.metric or next(iter(outcome.study.metrics)), outcome.ours
    kept = {axis: labels for axis, labels in show.where.items() if axis == show.axis}
    labels = [label for label in values.labels[show.axis] if matches(kept, {show.axis: label})]
    lines: dict[str, list[tuple[int, float, float, float]]] = {}
    for at in values.places(metric, show.where):
        found = values.get(metric, at)
        if found is not None:
            dots = lines.setdefault(_name(outcome, at, (show.axis, *_fixed(show))) or metric, [])
            dots.append((labels.index(at[show.axis]), found.mean, min(found.seeds), max(found.seeds)))
    shown = [(name, sorted(dots)) for name, dots in lines.items()]
    return f"<h2>{escape(metric)} by {escape(show.axis)}{_of(show)}</h2>{along(shown, labels, metric, show.axis)}"


def _matrix(outcome: Outcome, number: int, show: Show) -> str:
    """The last round of a recorded table, of the first seed of every place."""
    out = [f"<h2>{escape(show.figure.capitalize())}, last round</h2>"]
    for at, runs in _groups(outcome, show):
        if show.figure not in runs[0].tables:
            continue
        frame = runs[0].table(show.figure)
        last = frame[frame["round"] == frame["round"].max()].pivot(index="client", columns="other", values="value")
        texts = [[f"{value:.2f}".removeprefix("0") for value in row] for row in last.to_numpy().tolist()]
        drawn = heat_map(
            last.fillna(0).to_numpy().tolist(), [str(c) for c in last.columns], show.figure, first=1000 * number + len(out),
            heads=[str(c) for c in last.index], words=("client", "other", ""), texts=texts,
        )  # fmt: skip
        out.append(f'<h3>{escape(_name(outcome, at, ()))}</h3><div class="scroll">{drawn}</div>')
    return "".join(out)


def _fixed(show: Show) -> list[str]:
    """Axes of which a chart shows one label: its title says which, the lines need not."""
    return [axis for axis, labels in show.where.items() if len(as_labels(labels)) == 1]


def _of(show: Show) -> str:
    labels = " ".join(as_labels(show.where[axis])[0] for axis in _fixed(show))
    return f": {escape(labels)}" if labels else ""


def _groups(outcome: Outcome, show: Show) -> Iterable[tuple[At, list[Run]]]:
    """The finished runs of every place that a chart shows."""
    for cell in outcome.grid.cells:
        if cell.seed == 0 and matches(show.where, cell.at):
            runs = [run for run in outcome.runs[place("", cell.at)] if run is not None]
            if runs:
                yield cell.at, runs


def _name(outcome: Outcome, at: At, without: Sequence[str]) -> str:
    """The labels that tell lines apart."""
    varied = [axis for axis, labels in outcome.ours.labels.items() if len(labels) > 1 and axis not in without]
    return " ".join(at[axis] for axis in varied if axis in at)


def _notes(outcome: Outcome) -> str:
    grid, items = outcome.grid, [escape(note) for note in outcome.study.notes]
    if grid.substitutes:
        items.append(f"Stand-ins: {escape('; '.join(grid.substitutes))}. Figures are not to be compared with the printed ones.")
    if told := changed(outcome.study, grid.scale, grid.wanted.changes):
        items.append(f"Other than the paper's setting, in all cells: {escape('; '.join(told))}.")
    if outcome.study.variants and grid.wanted.variant != "both":
        other = "the released code" if grid.wanted.variant == "card" else "the method card"
        items.append(f"Paper and released code differ in what may decide this result; <code>--variant both</code> plays {other} too.")
    listed = "".join(f"<li>{item}</li>" for item in items)
    return f'<section><h2>To be kept in mind</h2><ul class="notes">{listed}</ul></section>' if items else ""


def _origin(outcome: Outcome) -> str:
    played = outcome.played
    if not played:
        return "Nothing was played to its end yet."
    began = min(run.manifest["began"] for run in played)
    devices = ", ".join(sorted({f"{run.manifest['device']}, plan {run.manifest['plan']['name']}" for run in played}))
    return f"Begun {began} with holdfast {played[0].manifest['holdfast']}, PyTorch {played[0].manifest['torch']}, device {devices}."


def markdown(outcome: Outcome, sheet: Sheet) -> str:
    """For notes and docs: the table, the claims, the command."""
    lines = [f"### {title(outcome)}", "", f"`{command(outcome)}`", ""]
    for one in outcome.data:
        lines.append(f"{one['dataset']}: {one['clients']} clients, {one['rounds']} rounds, {one['samples']:,} of {one['of']:,} samples.  ")
    unit = "In brackets: printed." if outcome.study.printed else ""
    lines += ["", to_markdown(to_table(sheet)), f"{unit} {_origin(outcome)}".strip(), ""]
    lines += [_claim_line(ours, printed, outcome.study.printed is not None) for ours, printed in outcome.findings]
    return "\n".join(lines) + "\n"


def _claim_line(ours: Finding, printed: Finding, numbers: bool) -> str:
    print_too = f" (in print: {printed.words})" if numbers else ""
    return f"* {ours.claim.says}: **{ours.words}**{print_too}"
