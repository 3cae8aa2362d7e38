"""Many small charts: every client's accuracy over the rounds, and what the rounds took in bytes and
seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from markupsafe import Markup

from holdfast.report import run_plots, svg
from holdfast.report.axis import Axis, PlotArea, broken_line, nice_ticks, round_ticks, shorten
from holdfast.report.markup import Section, fill
from holdfast.report.numbers import amount, duration
from holdfast.report.read_runs import RunRecord
from holdfast.report.run_data import MOST_ROUNDS, RunData

_WIDE, _HIGH = 132, 68  # of one client's chart
_AREA = PlotArea(7, 20, _WIDE - 7, _HIGH - 5)
_CLASSES = ("c0", "c1", "c2")
_NAME = 11  # letters of a name beside its accuracy


def every_client(run_data: RunData, model: str) -> Section | None:
    """A chart for each: its accuracy, and behind it the mean of all benign clients."""
    rounds = [round for round, found in run_data.accuracy.items() if found]
    clients = [
        client for client in run_data.clients if any(client in run_data.accuracy[round] for round in rounds)
    ]
    if not clients or len(rounds) < 2:
        return None
    attackers = run_data.malicious
    values = np.array(
        [[run_data.accuracy[round].get(client, np.nan) for round in rounds] for client in clients]
    )
    benign = [
        [a for client, a in run_data.accuracy[round].items() if client not in attackers] for round in rounds
    ]
    mean = np.array([np.mean(found) if found else np.nan for found in benign])
    low = nice_ticks(float(np.nanmin(values)), 1.0)[0]
    back = _path(rounds, mean, low)
    charts = [
        _chart(run_data, client, row, rounds, low, back) for client, row in zip(clients, values, strict=True)
    ]
    body = fill(
        "sections/every_client.html",
        model=model,
        low=f"{100 * low:.3g}",
        attackers=bool(attackers),
        shown_attackers=bool(attackers & set(clients)),
        bans=any(client in run_data.banned for client in clients),
        shown=len(clients),
        everyone=run_data.everyone,
        charts=charts,
    )
    small = [
        (run_data.mark(client), row, run_data.banned[client][0] if client in run_data.banned else None)
        for client, row in zip(clients, values, strict=True)
    ]
    return Section("Every client over the rounds", body, [run_plots.client_curves(rounds, small, mean, low)])


def _chart(
    run_data: RunData, client: int, row: np.ndarray, rounds: Sequence[int], low: float, back: str
) -> Markup:
    name, known = run_data.mark(client), row[np.isfinite(row)]
    foe, banned = name.startswith("▲"), run_data.banned.get(client)
    words = f"client {run_data.name(client)}{', an attacker' if foe else ''}"
    words += f", banned in round {banned[0]}: {banned[1]}" if banned else ""
    words += f": accuracy {100 * known[-1]:.1f} % finally"
    words += f", {100 * known.min():.1f} to {100 * known.max():.1f} %"
    kind = "foe" if foe else "own"
    drawn = [
        svg.title(words),
        svg.text(kind, 7, 14, shorten(name, _NAME)),
        svg.text("end", _WIDE - 7, 14, f"{100 * known[-1]:.1f} %"),
        svg.path("mean-behind", back),
        svg.path("own", _path(rounds, row, low)),
    ]
    if banned:
        x = _AREA.round_x(max(banned[0], rounds[0]), rounds[0], rounds[-1])
        drawn.append(svg.path("cross", f"M{x - 3:.0f} {_HIGH - 10}l6 6m0 -6l-6 6"))
    return svg.chart(kind, _WIDE, _HIGH, words, drawn)


def _path(rounds: Sequence[int], values: np.ndarray, low: float) -> str:
    axis = Axis([low, 1.0])
    return broken_line(
        (_AREA.round_x(round, rounds[0], rounds[-1]), _AREA.y(axis.share(value)))
        for round, value in zip(rounds, values.tolist(), strict=True)
    )


def costs(record: RunRecord) -> Section | None:
    """Bytes and seconds of every round, each as a pile of its parts."""
    parts = [part for part in record.parts if part.get("metrics")]
    if not parts:
        return None
    rounds = [part["round"] for part in parts]
    seconds = {
        word: [float(p.get("seconds", {}).get(name, 0.0)) for p in parts]
        for name, word in (("client", "clients"), ("server", "server"), ("evaluate", "evaluation"))
    }
    traffic = {
        word: [float(p["metrics"].get(f"bytes/{name}") or 0.0) for p in parts]
        for name, word in (("down", "down"), ("up", "up"))
    }
    kinds = [
        (title, piles, write)
        for title, piles, write in (("Bytes", traffic, amount), ("Seconds", seconds, _spent))
        if any(map(any, piles.values()))
    ]
    charts = [
        (title, _in_all(piles, write), stack(rounds, piles, title, write)) for title, piles, write in kinds
    ]
    if not charts:
        return None
    body = fill("sections/costs_by_round.html", charts=charts)
    drawings = [run_plots.stack(rounds, piles, title, write) for title, piles, write in kinds]
    return Section("Bytes and seconds, round by round", body, drawings)


def _in_all(piles: dict[str, list[float]], write: Callable[[float], str]) -> str:
    return "in all " + ", ".join(f"{write(sum(values))} {name}" for name, values in piles.items())


def stack(
    rounds: Sequence[int], piles: dict[str, list[float]], name: str, write: Callable[[float], str]
) -> Markup:
    """Bars, the first pile at the bottom; of very many rounds, means over some of them."""
    width, height = 560, 220
    area = PlotArea(62, 12, width - 126, height - 30)
    every = -(-len(rounds) // MOST_ROUNDS)
    groups = [range(start, min(start + every, len(rounds))) for start in range(0, len(rounds), every)]
    means = {
        word: [sum(values[i] for i in group) / len(group) for group in groups]
        for word, values in piles.items()
    }
    most = max(map(sum, zip(*means.values(), strict=True)))
    axis, bar = Axis(nice_ticks(0.0, most, 4)), (area.right - area.left) / len(groups)

    def y(value: float) -> float:
        return area.y(axis.share(value))

    out = area.value_axis(axis, write)
    out += area.labels_below(
        (area.left + (rounds.index(tick) // every + 0.5) * bar if tick in rounds else area.left, str(tick))
        for tick in round_ticks(rounds[0], rounds[-1])
    )
    out.append(area.name_beside("round"))
    floor, labels = [0.0] * len(groups), 0.0
    for colour, (word, values) in zip(_CLASSES, means.items(), strict=False):
        bars = enumerate(zip(floor, values, strict=True))
        path = "".join(
            f"M{area.left + (i + 0.5) * bar:.1f} {y(low):.1f}V{y(low + v):.1f}" for i, (low, v) in bars if v
        )
        share = sum(piles[word]) / (sum(map(sum, piles.values())) or 1)
        pile = svg.path("stack", path, stroke_width=f"{max(bar - 1, 0.8 * bar):.1f}")
        name_of_pile = svg.text(
            "label", area.right + 8, f"{area.bottom - labels:.0f}", f"{word} {100 * share:.0f} %"
        )
        out.append(svg.group(colour, pile, name_of_pile))
        floor, labels = [low + v for low, v in zip(floor, values, strict=True)], labels + 17
    return svg.chart("chart", width, height, name, out)


def _spent(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 or not seconds else f"{1000 * seconds:.3g} ms"
