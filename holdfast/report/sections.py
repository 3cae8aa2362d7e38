"""The page, section by section. Everything that comes from a run is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.report.charts import Series, curves, heat_map, line_class, strips, worth_seeing
from holdfast.report.gather import Cell, Line, asked, not_begun
from holdfast.report.harm import attacked, held_or_fell
from holdfast.report.holdings import Holdings, in_words, spread
from holdfast.report.repeat import command, config_text, without_defaults
from holdfast.report.table import STATUS, columns, tabulate
from holdfast.report.toml import to_toml

CURVES = {"accuracy": "Accuracy", "loss": "Loss", "macro_f1": "Macro-F1", "balanced_accuracy": "Balanced accuracy", "auc": "AUC"}
MOST_CLIENTS = 100  # columns of the heat map


def charted(lines: Sequence[Line]) -> dict[str, str]:
    """What has a curve: accuracy and loss, and of what the runs were asked for that which was defined."""
    more = [metric for metric in asked(lines) if any(line.curve(metric) for line in lines)]
    return {metric: CURVES[metric] for metric in ("accuracy", "loss", *more)}


def title(lines: Sequence[Line]) -> str:
    data = " and ".join(sorted({str(line.cells[0].config["data"]["name"]) for line in lines}))
    names = [line.label for line in lines]
    who = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1] if len(names) <= 4 else f"{len(names)} settings"
    return f"{who} on {data}"


def facts(lines: Sequence[Line]) -> str:
    """The setting in a line; what differs between runs is left out."""
    cells = [cell for line in lines for cell in line.cells]
    seeds = max(line.seeds for line in lines)
    rows = [
        ("", _common(cells, lambda c: f"{c.manifest['clients']} clients")),
        ("data ", _common(cells, lambda c: c.config["data"]["name"])),
        ("dealt by ", _common(cells, lambda c: in_words(c.config["data"]["partition"]))),
        ("model ", _common(cells, lambda c: f"{in_words(c.config['model'])}, {c.manifest['parameters']:,} parameters")),
        ("", _common(cells, lambda c: f"{c.rounds} rounds")),
        ("", f"{seeds} seeds each" if seeds > 1 else None),
        ("attack ", _common(cells, lambda c: in_words(c.config["attack"]) if c.config["attack"] is not None else "none")),
    ]
    return '<ul class="facts">' + "".join(f"<li>{word}<b>{escape(value)}</b></li>" for word, value in rows if value) + "</ul>"


def headline(lines: Sequence[Line]) -> str:
    table, shown = tabulate(lines), columns(lines)
    heads = "".join(f'<th class="figure" scope="col" title="{escape(column.help)}">{escape(column.title)}</th>' for column in shown)
    heads += "".join(f'<th class="{STATUS}" scope="col">{title}</th>' for title in table.titles[len(shown) + 1 :])
    rows = []
    for place, row in enumerate(table.rows):
        cells = []
        for name, entry in zip(table.titles[1:], row[1:], strict=True):
            kind = STATUS if name == STATUS else "best" if entry.best else "plain"
            cells.append(f'<td class="{kind}">{escape(entry.text)}</td>')
        rows.append(f'<tr><th scope="row">{swatch(place)}{escape(row[0].text)}</th>{"".join(cells)}</tr>')
    notes = ["★ best of its column."] if len(lines) > 1 else []
    if any(line.seeds > 1 for line in lines):
        notes.append("± is the standard deviation over seeds.")
    if len(lines) > 1 or lines[0].seeds > 1:
        notes.append("Runs that are played together share their time, so it does not rank methods.")
    notes += _troubles([cell for line in lines for cell in line.cells])
    name, said = verdict(lines)
    return (
        f'<p class="verdict"><strong>{escape(name)}</strong> {escape(said)}</p>'
        f'<section><h2>{_question(lines)}</h2>'
        f'<div class="scroll"><table><thead><tr><th></th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        + (f'<p class="note below">{" ".join(notes)}</p>' if notes else "")
        + f'{_all_figures(lines)}</section>'
    )


def _question(lines: Sequence[Line]) -> str:
    return "Who held, who fell" if attacked(lines) else "Who is best" if len(lines) > 1 else "Figures"


def _troubles(cells: Sequence[Cell]) -> list[str]:
    """What keeps figures from being what they seem."""
    status = [cell.standing.status for cell in cells]
    notes = []
    if unfinished := sum(said in ("begun", "not begun") for said in status):
        notes.append(f"{unfinished} of the runs have not finished; their figures are of their last evaluated round.")
    if diverged := status.count("diverged"):
        notes.append(f"{diverged} of the runs diverged: from that round on, or for a while, nothing that was trained could be used.")
    if failed := status.count("failed"):
        notes.append(f"{failed} of the runs failed and have no figures.")
    if noted := [note for cell in cells for part in cell.parts for note in part.get("attack", [])]:
        notes.append(f"An attack was not quite its formula in some rounds: {escape(noted[0])}.")
    if missing := not_begun(cells):
        notes.append(f"{missing} cells of the sweep have not begun, or failed before their first round, and are not shown.")
    return notes


def verdict(lines: Sequence[Line]) -> tuple[str, str]:
    """The result in a sentence or two, with its uncertainty: who, and what is to be said of it."""
    ranked = sorted((line for line in lines if line.mean("accuracy") is not None), key=lambda line: -(line.mean("accuracy") or 0.0))
    if not ranked:
        return "Nothing", "was evaluated yet."
    if attacked(lines):
        return held_or_fell(lines)
    first = ranked[0]
    top, low = first.mean("accuracy") or 0.0, first.mean("accuracy/worst10")
    said = f"answers {100 * top:.1f} % of a client's test samples right on average"
    worst = f" The tenth of the clients it serves worst get {100 * low:.1f} %." if low is not None else ""
    if len(ranked) == 1:
        return first.label, f"{said}.{worst}"
    second = ranked[1]
    gap = top - (second.mean("accuracy") or 0.0)
    noise = max(first.spread("accuracy") or 0.0, second.spread("accuracy") or 0.0)
    doubt = " The gap is within the spread over seeds, so the order may be luck." if first.seeds > 1 and gap <= noise else ""
    if first.seeds == 1:
        doubt = " One seed each: the order may be luck."
    return first.label, f"{said}, {100 * gap:.1f} points more than {second.label}.{worst}{doubt}"


def _all_figures(lines: Sequence[Line]) -> str:
    """Every final figure, for those who look for one that is not above."""
    names = sorted({name for line in lines for cell in line.cells for name in cell.final} - {"diverged"})  # a mean round says nothing
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
        f'{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div></details>'
    )


def over_rounds(lines: Sequence[Line]) -> str:
    charts = []
    for metric, name in charted(lines).items():
        chart = curves([Series(line.label, line.curve(metric)) for line in lines], name, metric != "loss")
        charts.append(f'<div data-chart="{metric}"><h3>{name}</h3>{chart}</div>')
    cut = " What is far off the other values lies outside the charts." if any(_is_cut(lines, metric) for metric in charted(lines)) else ""
    band = " Bands reach from the lowest to the highest seed." if any(line.seeds > 1 for line in lines) else ""
    return (
        f'<section><h2>Over the rounds</h2><p class="note">Of the model each method deploys, on the clients\' test samples.{band}{cut}</p>'
        f'{_keys(lines)}<div class="two">{"".join(charts)}</div></section>'
    )


def _is_cut(lines: Sequence[Line], metric: str) -> bool:
    points = [point for line in lines for point in line.curve(metric)]
    return bool(points) and worth_seeing(points, metric != "loss") != (min(p[2] for p in points), max(p[3] for p in points))


def clients(lines: Sequence[Line]) -> str:
    rows = [(line.label, line.dots(), line.mean("accuracy"), line.mean("accuracy/worst10")) for line in lines]
    if not any(dots for _, dots, _, _ in rows):
        return ""
    many = max(len(dots) for _, dots, _, _ in rows)
    thinned = f" Of up to {many} clients, evenly thinned." if many > 600 else ""
    return (
        '<section><h2>Every client</h2><p class="note">A dot is one client (under one seed) after the last evaluated round: its '
        'accuracy on its own test samples. <span class="mark"></span> mean, <span class="mark dashed"></span> worst 10 %.'
        f'{thinned}</p>'
        f'<div class="scroll">{strips(rows)}</div></section>'
    )


def partition(cells: Sequence[Cell]) -> str:
    """Who holds what, for the first run; the others are dealt anew by seed."""
    cell = cells[0]
    try:
        holdings = Holdings.of(cell.run.config)
    except HoldfastError as error:
        return f'<section><h2>Who holds what</h2><p class="note">The data is not at hand: {escape(str(error))}</p></section>'
    others = len({c.manifest["partition"] for c in cells}) - 1
    words = [f"Training samples by client and class; a client has {spread(holdings.sizes)}."]
    if others:
        words.append(f"Of the first run (seed {cell.seed}); {others} other{'s are' if others > 1 else ' is'} dealt differently.")
    if MOST_CLIENTS < len(holdings.counts):
        words.append(f"The first {MOST_CLIENTS} of {len(holdings.counts):,} clients.")
    drawn = heat_map(holdings.counts[:MOST_CLIENTS].tolist(), holdings.names)
    return f'<section><h2>Who holds what</h2><p class="note">{" ".join(words)}</p><div class="scroll">{drawn}</div></section>'


def protocol(lines: Sequence[Line]) -> str:
    """Which model is measured, on whom, when: nothing hidden in the score."""
    alike: dict[tuple[str, ...], list[str]] = {}  # lines that were measured in the same way share a row
    for place, line in enumerate(lines):
        told = line.cells[0].protocol
        words = (_model_words(told), _client_words(told, line.cells[0]), _time_words(told, line.cells[0]))
        alike.setdefault(words, []).append(f'<div class="who">{swatch(place)}{escape(line.label)}</div>')
    rows = []
    for told_alike, names in alike.items():
        texts = "".join(f"<td>{escape(word)}</td>" for word in told_alike)
        rows.append(f'<tr><th scope="row">{"".join(names)}</th>{texts}</tr>')
    return (
        '<section><h2>How it was measured</h2><div class="scroll"><table class="words"><thead><tr><th></th><th scope="col">model</th>'
        f'<th scope="col">clients</th><th scope="col">when</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div></section>'
    )


def _model_words(told: dict[str, Any]) -> str:
    meaning = {
        "global": "the global model, one for all",
        "personal": "each client's personal model",
        "customised": "the model the server makes for each client",
    }
    kept = {"keep_own": "its own last one", "deliver": "what it would be sent", "finetune": "a copy trained from what it would be sent"}
    text = meaning.get(str(told["deployed"]), "unknown: the method is not at hand here")
    if told["deployed"] != "personal":
        return text
    trained = ", one in it: what its own training left" if told.get("selected") == "keep_own" else ""
    return f"{text} (a client outside the cohort: {kept[told['unselected']]}{trained})"


def _client_words(told: dict[str, Any], cell: Cell) -> str:
    groups = {"all": "all clients", "benign": "benign clients", "cohort": "the round's cohort", "held-out": "held-out clients"}
    who = groups[told["clients"]]
    share = cell.config["data"]["split"]["test"]
    on = "the dataset's whole test split" if told["test"] == "global" else f"each one's own test samples ({100 * share:g} % of its data)"
    return f"{who}, {on}" + ("; the mean leaves out malicious ones" if cell.config["attack"] is not None else "")


def _time_words(told: dict[str, Any], cell: Cell) -> str:
    every = "every round" if told["every"] == 1 else f"every {told['every']} rounds and the last"
    return f"{every}; the headline is the last round ({cell.rounds})"


def repeat(cells: Sequence[Cell]) -> str:
    text = config_text(cells)
    if text is not None:
        return (
            '<section><h2>Run it again</h2><p class="note">Save the config as config.toml. On the same kind of device and with the '
            f"same versions, the bits are the same.</p><pre>{escape(command(cells))}</pre><pre>{escape(text)}</pre></section>"
        )
    each = "".join(
        f"<details><summary>{escape(str(cell.manifest['label']))}</summary><pre>{escape(to_toml(without_defaults(cell.config)))}</pre></details>"
        for cell in cells
    )
    return (
        '<section><h2>Run it again</h2><p class="note">One config per run; save one as config.toml.</p>'
        f"<pre>{escape(command(cells))}</pre>{each}</section>"
    )


def swatch(place: int) -> str:
    return (
        f'<svg class="swatch {line_class(place)}" viewBox="0 0 26 12" aria-hidden="true"><path class="line" d="M1 6H25"/>'
        '<circle class="dot" cx="13" cy="6" r="3.5"/></svg>'
    )


def _keys(lines: Sequence[Line]) -> str:
    if len(lines) < 2:
        return ""
    buttons = (
        f'<button type="button" class="key" aria-pressed="true" data-key="{i}">{swatch(i)}{escape(line.label)}</button>'
        for i, line in enumerate(lines)
    )
    return f'<div class="keys" role="group" aria-label="Lines to show">{"".join(buttons)}</div>'


def _common(cells: Sequence[Cell], of: Any) -> str | None:
    values = {str(of(cell)) for cell in cells}
    return values.pop() if len(values) == 1 else None
