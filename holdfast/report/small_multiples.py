"""Many small charts: every client's accuracy over the rounds, and what the rounds took in bytes and
seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from holdfast.report.charts import nice_ticks, round_ticks
from holdfast.report.read_runs import Cell
from holdfast.report.run_data import MOST_ROUNDS, Story
from holdfast.report.table import amount, duration

_WIDE, _HIGH, _TOP = 132, 68, 20  # of one client's chart, and where its lines begin
_CLASSES = ("c0", "c1", "c2")


def every_client(story: Story, model: str) -> str:
    """A chart for each: its accuracy, and behind it the mean of all benign clients."""
    rounds = [round for round, found in story.accuracy.items() if found]
    clients = [client for client in story.clients if any(client in story.accuracy[round] for round in rounds)]
    if not clients or len(rounds) < 2:
        return ""
    attackers = story.malicious
    values = np.array([[story.accuracy[round].get(client, np.nan) for round in rounds] for client in clients])
    benign = [
        [a for client, a in story.accuracy[round].items() if client not in attackers] for round in rounds
    ]
    mean = np.array([np.mean(found) if found else np.nan for found in benign])
    low = nice_ticks(float(np.nanmin(values)), 1.0)[0]
    back = _path(rounds, mean, low)
    charts = [
        _chart(story, client, row, rounds, low, back) for client, row in zip(clients, values, strict=True)
    ]
    few = f" Shown are {len(clients)} of {story.everyone:,} clients." if len(clients) < story.everyone else ""
    foes = " ▲ and a dashed frame: an attacker." if attackers & set(clients) else ""
    gone = " ✕: banned in that round." if any(client in story.banned for client in clients) else ""
    return (
        f'<section><h2>Every client over the rounds</h2><p class="note">Accuracy of the {escape(model)} model'
        f" on the client's own test samples, from {100 * low:.3g} to 100 %, with the last value at the top"
        " right. Dashed behind it: the mean of the"
        f" {'benign ' if attackers else ''}clients.{foes}{gone}{few}</p><div"
        f' class="many">{"".join(charts)}</div></section>'
    )


def _chart(story: Story, client: int, row: np.ndarray, rounds: Sequence[int], low: float, back: str) -> str:
    name, known = story.mark(client), row[np.isfinite(row)]
    foe, banned = name.startswith("▲"), story.banned.get(client)
    words = (
        "client"
        f" {client}{', an attacker' if foe else ''}{f', banned in round {banned[0]}: {banned[1]}' if banned else ''}:"  # noqa: E501
        " accuracy "
    )
    words += f"{100 * known[-1]:.1f} % at last, {100 * known.min():.1f} to {100 * known.max():.1f} %"
    cross = ""
    if banned:
        x = _x(max(banned[0], rounds[0]), rounds)
        cross = f'<path class="cross" d="M{x - 3:.0f} {_HIGH - 10}l6 6m0 -6l-6 6"/>'
    kind = "foe" if foe else "own"
    return (
        f'<svg class="{kind}" viewBox="0 0 {_WIDE} {_HIGH}" role="img"'
        f' aria-label="{escape(words)}"><title>{escape(words)}</title><text class="{kind}" x="7"'
        f' y="14">{name}</text><text class="end" x="{_WIDE - 7}" y="14">{100 * known[-1]:.1f} %</text><path'
        f' class="mean-behind" d="{back}"/><path class="own" d="{_path(rounds, row, low)}"/>{cross}</svg>'
    )


def _x(round: float, rounds: Sequence[int]) -> float:
    return 7 + (round - rounds[0]) / (rounds[-1] - rounds[0]) * (_WIDE - 14)


def _path(rounds: Sequence[int], values: np.ndarray, low: float) -> str:
    out, pen = "", "M"
    for round, value in zip(rounds, values.tolist(), strict=True):
        if np.isfinite(value):
            out += f"{pen}{_x(round, rounds):.0f} {_TOP + (1 - value) / (1 - low) * (_HIGH - _TOP - 5):.1f}"
        pen = "L" if np.isfinite(value) else "M"
    return out


def costs(cell: Cell) -> str:
    """Bytes and seconds of every round, each as a pile of its parts."""
    parts = [part for part in cell.parts if part.get("metrics")]
    if not parts:
        return ""
    rounds = [part["round"] for part in parts]
    seconds = {
        word: [float(p.get("seconds", {}).get(name, 0.0)) for p in parts]
        for name, word in (("client", "clients"), ("server", "server"), ("evaluate", "evaluation"))
    }
    traffic = {
        word: [float(p["metrics"].get(f"bytes/{name}") or 0.0) for p in parts]
        for name, word in (("down", "down"), ("up", "up"))
    }
    charts = [
        f"<div><h3>{title}"
        f" <small>{escape(_in_all(piles, write))}</small></h3>{stack(rounds, piles, title, write)}</div>"
        for title, piles, write in (("Bytes", traffic, amount), ("Seconds", seconds, _spent))
        if any(map(any, piles.values()))
    ]
    return (
        "<section><h2>Bytes and seconds, round by round</h2><div"
        f' class="two">{"".join(charts)}</div></section>'
        if charts
        else ""
    )


def _in_all(piles: dict[str, list[float]], write: Callable[[float], str]) -> str:
    return "in all " + ", ".join(f"{write(sum(values))} {name}" for name, values in piles.items())


def stack(
    rounds: Sequence[int], piles: dict[str, list[float]], name: str, write: Callable[[float], str]
) -> str:
    """Bars, the first pile at the bottom; of very many rounds, means over some of them."""
    width, height, left, right, top, bottom = 560, 220, 62, 126, 12, 30
    every = -(-len(rounds) // MOST_ROUNDS)
    groups = [range(start, min(start + every, len(rounds))) for start in range(0, len(rounds), every)]
    means = {
        word: [sum(values[i] for i in group) / len(group) for group in groups]
        for word, values in piles.items()
    }
    most = max(map(sum, zip(*means.values(), strict=True)))
    ticks, bar = nice_ticks(0.0, most, 4), (width - left - right) / len(groups)

    def y(value: float) -> float:
        return top + (1 - value / ticks[-1]) * (height - top - bottom)

    out = [f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}">']
    for tick in ticks:
        out.append(f'<path class="grid" d="M{left} {y(tick):.1f}H{width - right}"/>')
        out.append(f'<text class="tick end" x="{left - 8}" y="{y(tick) + 4:.1f}">{write(tick)}</text>')
    for tick in round_ticks(rounds[0], rounds[-1]):
        x = left + (rounds.index(tick) // every + 0.5) * bar if tick in rounds else left
        out.append(f'<text class="tick middle" x="{x:.1f}" y="{height - 12}">{tick}</text>')
    out.append(f'<text class="tick end" x="{left - 8}" y="{height - 12}">round</text>')
    floor, labels = [0.0] * len(groups), 0.0
    for colour, (word, values) in zip(_CLASSES, means.items(), strict=False):
        bars = enumerate(zip(floor, values, strict=True))
        path = "".join(
            f"M{left + (i + 0.5) * bar:.1f} {y(low):.1f}V{y(low + v):.1f}" for i, (low, v) in bars if v
        )
        share = sum(piles[word]) / (sum(map(sum, piles.values())) or 1)
        out.append(
            f'<g class="{colour}"><path class="stack" stroke-width="{max(bar - 1, 0.8 * bar):.1f}"'
            f' d="{path}"/><text class="label" x="{width - right + 8}"'
            f' y="{height - bottom - labels:.0f}">{word} {100 * share:.0f} %</text></g>'
        )
        floor, labels = [low + v for low, v in zip(floor, values, strict=True)], labels + 17
    return "".join(out) + "</svg>"


def _spent(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 or not seconds else f"{1000 * seconds:.3g} ms"
