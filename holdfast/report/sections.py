"""The page, section by section. Everything that comes from a run is escaped here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.toml import to_toml
from holdfast.report.attack_effects import attacked, held_or_fell, worst_cases
from holdfast.report.charts import heat_map, strips, swatch
from holdfast.report.class_counts import Holdings, in_words, spread
from holdfast.report.equal_runs import without_effect
from holdfast.report.read_runs import Cell, Line, not_begun
from holdfast.report.rerun_config import command, config_text, without_defaults
from holdfast.report.robustness_map import score_map
from holdfast.report.settings_by_attack import BENIGN, WORST, Crossing, Grid
from holdfast.report.table import STATUS, columns, percent, tabulate

MOST_CLIENTS = 100  # columns of the heat map
MOST_ROWS = 24  # of a list that is shown at once
MOST_DOTS = 6000  # clients' dots on a page


def title(lines: Sequence[Line], crossing: Crossing) -> str:
    data = " and ".join(sorted({str(line.cells[0].config["data"]["name"]) for line in lines}))
    attacks = len({one.attack for one in crossing.faced} - {BENIGN})
    names = crossing.settings if attacks > 1 else [line.label for line in lines]
    who = (
        names[0]
        if len(names) == 1
        else ", ".join(names[:-1]) + " and " + names[-1]
        if len(names) <= 4
        else f"{len(names)} settings"
    )
    return f"{who}{f' under {attacks} attacks' if attacks > 1 else ''} on {data}"


def facts(lines: Sequence[Line]) -> str:
    """The setting in a line; what differs between runs is left out."""
    cells = [cell for line in lines for cell in line.cells]
    fewest, seeds = (most(line.seeds for line in lines) for most in (min, max))
    rows = [
        ("", _common(cells, lambda c: f"{c.manifest['clients']} clients")),
        ("data ", _common(cells, lambda c: c.config["data"]["name"])),
        ("dealt by ", _common(cells, lambda c: in_words(c.config["data"]["partition"]))),
        (
            "model ",
            _common(
                cells, lambda c: f"{in_words(c.config['model'])}, {c.manifest['parameters']:,} parameters"
            ),
        ),
        ("", _common(cells, lambda c: f"{c.rounds} rounds")),
        (
            "",
            (
                None
                if seeds == 1
                else f"{seeds} seeds each"
                if fewest == seeds
                else f"{fewest} to {seeds} seeds each"
            ),
        ),
        (
            "attack ",
            _common(
                cells, lambda c: in_words(c.config["attack"]) if c.config["attack"] is not None else "none"
            ),
        ),
    ]
    return (
        '<ul class="facts">'
        + "".join(f"<li>{word}<b>{escape(value)}</b></li>" for word, value in rows if value)
        + "</ul>"
    )


def headline(lines: Sequence[Line], crossing: Crossing) -> str:
    """The result in words, and what shows it: against whom everybody held, or, where that is no question, the
    figures."""
    name, said = verdict(lines, crossing)
    words = f'<p class="verdict"><strong>{escape(name)}</strong> {escape(said).replace(" %", "&nbsp;%")}</p>'
    if _mapped(crossing):
        return words + _maps(_mapped(crossing))
    question = (
        "Who held, who fell"
        if attacked(lines) and len(lines) > 1
        else "Who is best"
        if len(lines) > 1
        else "Figures"
    )
    return f"{words}<section><h2>{question}</h2>{_figures(lines, crossing, ranked=True)}{_all_figures(lines)}</section>"  # noqa: E501


def figures(lines: Sequence[Line], crossing: Crossing) -> str:
    """What the maps have no room for."""
    if not _mapped(crossing):
        return ""
    table = f"{_figures(lines, crossing, ranked=False)}{_all_figures(lines)}"
    return f"<section><h2>Figures</h2>{folded(table, len(lines))}</section>"


def folded(content: str, rows: int) -> str:
    """Long lists wait to be opened."""
    return content if rows <= MOST_ROWS else f"<details><summary>All {rows} rows</summary>{content}</details>"


def _mapped(crossing: Crossing) -> list[Grid]:
    """A map for each dataset; without two attacks or two settings to compare, the table of figures says all
    of it."""
    return [grid for grid in crossing.grids if len(grid.attacks) > 1 and len(grid.settings) > 1]


def _maps(grids: Sequence[Grid]) -> str:
    drawn = []
    for grid in grids:
        title = f"<h3>{escape(grid.data)}</h3>" if len(grids) > 1 else ""
        drawn.append(
            f'{title}<div class="scroll">{score_map(grid, f", {grid.data}" if len(grids) > 1 else "")}</div>'
        )
    notes = ["Accuracy of the benign clients after the last round, mean over seeds ± standard deviation."]
    notes.append("A stronger colour is a higher accuracy, ★ the best of its column.")
    if any(WORST in grid.columns for grid in grids):
        notes.append("The worst case is the attack that costs a setting most.")
    return (
        f'<section><h2>Who held, who fell</h2><p class="note">{" ".join(notes)}</p>{"".join(drawn)}</section>'
    )


def _figures(lines: Sequence[Line], crossing: Crossing, ranked: bool) -> str:
    """`ranked`: the best of a column is marked, which says something where all rows faced the same."""
    table, shown = tabulate(lines), columns(lines)
    heads = "".join(
        f'<th class="figure" scope="col" title="{escape(column.help)}">{escape(column.title)}</th>'
        for column in shown
    )
    heads += "".join(
        f'<th class="{STATUS}" scope="col">{title}</th>' for title in table.titles[len(shown) + 1 :]
    )
    rows = []
    for line, row in zip(lines, table.rows, strict=True):
        cells = []
        for name, entry in zip(table.titles[1:], row[1:], strict=True):
            kind = (
                (STATUS if len(entry.text) > 24 else "brief")
                if name == STATUS
                else "best"
                if entry.best and ranked
                else "plain"
            )
            value = "" if entry.value is None else f' data-value="{entry.value:.6g}"'
            cells.append(f'<td class="{kind}"{value}>{escape(entry.text)}</td>')
        rows.append(
            "<tr><th"
            f' scope="row">{swatch(crossing.place(line))}{escape(row[0].text)}</th>{"".join(cells)}</tr>'
        )
    several = len(crossing.grids) > 1 or any(len(grid.attacks) > 1 for grid in crossing.grids)
    alike = " among those that faced the same" if several else ""
    notes = (
        [f"★ best of its column{alike}."]
        if ranked and any(entry.best for row in table.rows for entry in row)
        else []
    )
    if any(line.seeds > 1 for line in lines):
        notes.append("± is the standard deviation over seeds.")
    if len(lines) > 1 or lines[0].seeds > 1:
        notes.append("Runs that are played together share their time, so it does not rank methods.")
    notes += _troubles([cell for line in lines for cell in line.cells])
    return (
        f'<div class="scroll"><table{_sortable(lines)}><thead><tr><th scope="col"'
        f' class="first">setting</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        + (f'<p class="note below">{" ".join(notes)}</p>' if notes else "")
    )


def _sortable(rows: Sequence[object]) -> str:
    """For the page's script, which puts a button on every head."""
    return ' class="sortable"' if len(rows) > 2 else ""


def _troubles(cells: Sequence[Cell]) -> list[str]:
    """What keeps figures from being what they seem."""
    status = [cell.run_status.status for cell in cells]
    notes = []
    if unfinished := sum(said in ("begun", "not begun") for said in status):
        have = (
            "has not finished; its figures are of its"
            if unfinished == 1
            else "have not finished; their figures are of their"
        )
        notes.append(f"{unfinished} of the runs {have} last evaluated round.")
    if diverged := status.count("diverged"):
        notes.append(
            f"{diverged} of the runs diverged: from that round on, or for a while, nothing that was trained"
            " could be used."
        )
    if failed := status.count("failed"):
        notes.append(f"{failed} of the runs failed and have no figures.")
    if noted := [note for cell in cells for part in cell.parts for note in part.get("attack", [])]:
        notes.append(f"An attack was not quite its formula in some rounds: {escape(noted[0])}.")
    notes += [escape(said) for said in without_effect(cells)]
    if missing := not_begun(cells):
        notes.append(
            f"{missing} cells of the sweep have not begun, or failed before their first round, and are not"
            " shown."
        )
    return notes


def verdict(lines: Sequence[Line], crossing: Crossing | None = None) -> tuple[str, str]:
    """The result in a sentence or two, with its uncertainty: who, and what is to be said of it."""
    ranked = sorted(
        (line for line in lines if line.mean("accuracy") is not None),
        key=lambda line: -(line.mean("accuracy") or 0.0),
    )
    if not ranked:
        return "Nothing", "was evaluated yet."
    crossing = crossing or Crossing(lines)
    name, said = worst_cases(crossing.grids) or (
        held_or_fell(lines) if attacked(lines) else _best(ranked, crossing)
    )
    return name, said + _doubts([cell for line in lines for cell in line.cells])


def _doubts(cells: Sequence[Cell]) -> str:
    """Runs whose figures are not what the sentence takes them for."""
    if len(cells) == 1:
        here = cells[0]
        told = {
            "begun": f"has played {here.round} of {here.rounds} rounds",
            "diverged": f"diverged in round {here.run_status.round}",
        }
        return f" It {told[here.run_status.status]}." if here.run_status.status in told else ""
    status = [cell.run_status.status.removeprefix("not ") for cell in cells]
    counts = {word: status.count(word) for word in ("begun", "diverged", "failed")}
    said = [
        f"{n} {word if word != 'begun' else 'is not finished' if n == 1 else 'are not finished'}"
        for word, n in counts.items()
        if n
    ]
    return f" Of {len(cells)} runs {', '.join(said)}." if said else ""


def _best(ranked: Sequence[Line], crossing: Crossing) -> tuple[str, str]:
    """The first of them, compared with the next that faced the same."""
    first = ranked[0]
    top, low = first.mean("accuracy") or 0.0, first.mean("accuracy/worst10")
    whose, when = (
        ("a client's", "on average")
        if crossing.met(first)[0] == BENIGN
        else ("a benign client's", "under attack")
    )
    said = f"answers {100 * top:.1f} % of {whose} test samples right {when}"
    tenth = f" The tenth of the clients it serves worst get {100 * low:.1f} %." if low is not None else ""
    rivals = [line for line in ranked[1:] if crossing.met(line) == crossing.met(first)]
    if not rivals:
        return first.label, f"{said}.{tenth}"
    second = rivals[0]
    gap = top - (second.mean("accuracy") or 0.0)
    noise = max(first.spread("accuracy") or 0.0, second.spread("accuracy") or 0.0)
    doubt = (
        " The gap is within the spread over seeds, so the order may be luck."
        if first.seeds > 1 and gap <= noise
        else ""
    )
    if first.seeds == 1:
        doubt = " One seed each: the order may be luck."
    if not gap:
        return first.label, f"{said}, exactly as {second.label} does.{tenth}{doubt}"
    return first.label, f"{said}, {100 * gap:.1f} points more than {second.label}.{tenth}{doubt}"


def _all_figures(lines: Sequence[Line]) -> str:
    """Every final figure, for those who look for one that is not above."""
    names = sorted(
        {name for line in lines for cell in line.cells for name in cell.final} - {"diverged"}
    )  # a mean round says nothing
    over = " (means over seeds)" if any(line.seeds > 1 for line in lines) else ""
    heads = "".join(f'<th scope="col">{escape(line.label)}</th>' for line in lines)
    rows = []
    for name in names:
        values = [line.mean(name) for line in lines]
        if any(value is not None for value in values):
            texts = "".join(f"<td>{'–' if value is None else f'{value:,.6g}'}</td>" for value in values)
            rows.append(f'<tr><th scope="row">{escape(name)}</th>{texts}</tr>')
    return (
        f'<details><summary>All figures{over}</summary><div class="scroll"><table><thead><tr><th></th>'
        f"{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def clients(lines: Sequence[Line], crossing: Crossing) -> str:
    rows = [(line.label, line.dots(), line.mean("accuracy"), line.mean("accuracy/worst10")) for line in lines]
    if not any(dots for _, dots, _, _ in rows):
        return ""
    many, most = max(len(dots) for _, dots, _, _ in rows), max(60, min(600, MOST_DOTS // len(rows)))
    drawn = f'<div class="scroll">{strips(rows, most, [crossing.place(line) for line in lines])}</div>'
    thinned = f" Of up to {many} clients, evenly thinned." if many > most else ""
    attackers = any(dot.malicious for _, dots, _, _ in rows for dot in dots)
    foes = " A hollow triangle is an attacker; both marks leave it out." if attackers else ""
    return (
        '<section><h2>Every client</h2><p class="note">A dot is one client (under one seed) after the last'
        ' evaluated round: its accuracy on its own test samples. <span class="mark"></span> mean, <span'
        f' class="mark dashed"></span> worst 10 %.{foes}{thinned}</p>{folded(drawn, len(lines))}</section>'
    )


def partition(cells: Sequence[Cell]) -> str:
    """Who holds what, for the first run; the others are dealt anew by seed."""
    cell = cells[0]
    try:
        holdings = Holdings.of(cell.run.config)
    except HoldfastError as error:
        return (
            '<section><h2>Who holds what</h2><p class="note">The data is not at hand:'
            f" {escape(str(error))}</p></section>"
        )
    others = len({c.manifest["partition"] for c in cells}) - 1
    words = [f"Training samples by client and class; a client has {spread(holdings.sizes)}."]
    if others:
        words.append(
            f"Of the first run (seed {cell.seed}); {others} other{'s are' if others > 1 else ' is'} dealt"
            " differently."
        )
    if MOST_CLIENTS < len(holdings.counts):
        words.append(f"The first {MOST_CLIENTS} of {len(holdings.counts):,} clients.")
    drawn = heat_map(holdings.counts[:MOST_CLIENTS].tolist(), holdings.names)
    return (
        f'<section><h2>Who holds what</h2><p class="note">{" ".join(words)}</p><div'
        f' class="scroll">{drawn}</div></section>'
    )


def protocol(lines: Sequence[Line], crossing: Crossing) -> str:
    """Which model is measured, on whom, when: nothing hidden in the score."""
    alike: dict[tuple[str, ...], list[str]] = {}  # lines that were measured in the same way share a row
    for line in lines:
        told = line.cells[0].protocol
        words = (_model_words(told), _client_words(told, line.cells[0]), _time_words(told, line.cells[0]))
        alike.setdefault(words, []).append(
            f'<div class="who">{swatch(crossing.place(line))}{escape(line.label)}</div>'
        )
    rows = []
    for told_alike, names in alike.items():
        if len(names) > MOST_ROWS:
            names = [*names[: MOST_ROWS - 1], f'<div class="who">and {len(names) - MOST_ROWS + 1} more</div>']
        texts = "".join(f"<td>{escape(word)}</td>" for word in told_alike)
        rows.append(f'<tr><th scope="row">{"".join(names)}</th>{texts}</tr>')
    return (
        '<section><h2>How it was measured</h2><div class="scroll"><table'
        ' class="words"><thead><tr><th></th><th scope="col">model</th><th scope="col">clients</th><th'
        f' scope="col">when</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div></section>'
    )


def _model_words(told: dict[str, Any]) -> str:
    meaning = {
        "global": "the global model, one for all",
        "personal": "each client's personal model",
        "customised": "the model the server makes for each client",
    }
    kept = {
        "keep_own": "its own last one",
        "deliver": "what it would be sent",
        "finetune": "a copy trained from what it would be sent",
    }
    text = meaning.get(str(told["deployed"]), "unknown: the method is not at hand here")
    if told["deployed"] != "personal":
        return text
    trained = ", one in it: what its own training left" if told.get("selected") == "keep_own" else ""
    return f"{text} (a client outside the cohort: {kept[told['unselected']]}{trained})"


def _client_words(told: dict[str, Any], cell: Cell) -> str:
    groups = {
        "all": "all clients",
        "benign": "benign clients",
        "cohort": "the round's cohort",
        "held-out": "held-out clients",
    }
    who = groups[told["clients"]]
    share = cell.config["data"]["split"]["test"]
    on = (
        "the dataset's whole test split"
        if told["test"] == "global"
        else f"each one's own test samples ({100 * share:g} % of its data)"
    )
    return f"{who}, {on}" + (
        "; the mean leaves out malicious ones" if cell.config["attack"] is not None else ""
    )


def _time_words(told: dict[str, Any], cell: Cell) -> str:
    every = "every round" if told["every"] == 1 else f"every {told['every']} rounds and the last"
    last = max((round for round, _ in cell.curve("accuracy")), default=0)
    if last == cell.rounds:
        return f"{every}; the headline is the last round ({last})"
    if last > cell.rounds:  # what a method does at the end counts as one more round
        return f"{every}; the headline is what the method's last step, after round {cell.rounds}, made of it"
    return f"{every}; the headline is round {last} of {cell.rounds}, the last so far" if last else every


def repeat(cells: Sequence[Cell]) -> str:
    text = config_text(cells)
    if text is not None:
        return (
            '<section><h2>Run it again</h2><p class="note">Save the config as config.toml. On the same kind'
            " of device and with the same versions, the bits are the"
            f" same.</p><pre>{escape(command(cells))}</pre><pre>{escape(text)}</pre></section>"
        )
    each = "".join(
        f"<details><summary>{escape(str(cell.manifest['label']))}</summary><pre>{escape(to_toml(without_defaults(cell.config)))}</pre></details>"
        for cell in cells
    )
    return (
        '<section><h2>Run it again</h2><p class="note">One config per run; save one as config.toml.</p>'
        f"<pre>{escape(command(cells))}</pre>{each}</section>"
    )


def runs(cells: Sequence[Cell], links: Mapping[Path, str]) -> str:
    """Every run of a large sweep, with the page that is about it alone."""
    if not links:
        return ""
    rows = []
    for cell in cells:
        figures = [cell.final.get(name) for name in ("accuracy", "accuracy/worst10", "attack/lost")]
        told = [("", "–") if f is None else (f' data-value="{f:.6g}"', percent(f)) for f in figures]
        texts = "".join(f'<td class="plain"{value}>{words}</td>' for value, words in told)
        label = escape(str(cell.manifest["label"] or cell.label))
        name = f'<th scope="row"><a href="{escape(links[cell.path])}">{label}</a></th>'
        rows.append(f'<tr>{name}{texts}<td class="{STATUS}">{escape(cell.run_status.words)}</td></tr>')
    heads = "".join(f'<th scope="col">{word}</th>' for word in ("accuracy", "worst 10 %", "lost"))
    heads += f'<th scope="col" class="{STATUS}">{STATUS}</th>'
    return (
        '<section><h2>Every run</h2><p class="note">Each has a page of its own, with what happened inside'
        ' it.</p><div class="scroll"><table class="sortable"><thead><tr><th'
        f' scope="col">run</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div></section>'
    )


def _common(cells: Sequence[Cell], of: Any) -> str | None:
    values = {str(of(cell)) for cell in cells}
    return values.pop() if len(values) == 1 else None
