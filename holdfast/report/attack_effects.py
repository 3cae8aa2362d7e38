"""The effect of attacks on the settings of a page: accuracy lost, and the clients that were banned."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from holdfast.report import run_plots
from holdfast.report.axis import round_ticks
from holdfast.report.charts import line_class
from holdfast.report.markup import Section, fill
from holdfast.report.read_runs import SettingRuns
from holdfast.report.row_chart import Row, dot, row_chart, stacked
from holdfast.report.settings_by_attack import BENIGN, Score, ScoreGrid, SettingsByAttack

_WORTH_NAMING = 0.01  # of accuracy lost


def attacked(lines: Sequence[SettingRuns]) -> list[SettingRuns]:
    """The settings under attack whose runs without it are on the page too, the best first."""
    known = [
        line for line in lines if line.mean("attack/lost") is not None and line.mean("accuracy") is not None
    ]
    return sorted(known, key=lambda line: -(line.mean("accuracy") or 0.0))


def held_or_fell(lines: Sequence[SettingRuns]) -> tuple[str, str]:
    """The best setting under attack, in words: its accuracy, its bans, and what the attack costs the
    others."""
    best, *others = attacked(lines)
    cost = best.mean("attack/lost") or 0.0
    said = (
        f"classifies {100 * (best.mean('accuracy') or 0.0):.1f} % of a benign client's test samples correctly"
        " under attack"
    )
    more = "less" if cost > 0 else "more"
    said += (
        f", {100 * abs(cost):.1f} points {more} than the same clients reach without it."
        if abs(cost) >= 0.0005
        else ", as many as the same clients reach without it."
    )
    said += _bans_in_words(best)
    fell = sorted((line for line in others if (line.mean("attack/lost") or 0.0) >= _WORTH_NAMING), key=_lost)[
        :3
    ]
    if fell:
        costs = [f"{line.label} {-100 * _lost(line):.1f} points" for line in fell]
        said += f" The attack costs {_listed(costs)}."
    return best.label, said + (_luck(best, others) if others else "")


def _luck(best: SettingRuns, others: Sequence[SettingRuns]) -> str:
    """A sentence where the order may be chance, compared with the next best setting on the same data."""
    if best.seeds == 1:
        return " There is one seed each, so the order may be chance."
    rivals = [line for line in others if line.records[0].config["data"] == best.records[0].config["data"]]
    if not rivals:
        return ""
    gap = (best.mean("accuracy") or 0.0) - (rivals[0].mean("accuracy") or 0.0)
    return _lead(
        best.label,
        rivals[0].label,
        gap,
        max(best.spread("accuracy") or 0.0, rivals[0].spread("accuracy") or 0.0),
    )


def _lead(best: str, second: str, gap: float, spread: float) -> str:
    """A sentence where the lead over the second is small or zero."""
    if gap == 0:
        return f" {second} has exactly the same accuracy."
    return f" The lead of {best} over {second} is within the spread over seeds." if gap <= spread else ""


def worst_cases(grids: Sequence[ScoreGrid]) -> tuple[str, str] | None:
    """The best setting under several attacks, in words. Its worst case decides, because an attacker can
    choose. Uses the first dataset with several attacks and at least two settings."""
    for grid in grids:
        ranked = [(setting, grid.worst(setting)) for setting in grid.settings]
        known = [(setting, worst) for setting, worst in ranked if worst is not None]
        if len(grid.attacks) - (BENIGN in grid.attacks) < 2 or len(known) < 2:
            continue
        (best, held), *others = known
        where = f" on {grid.data}" if len(grids) > 1 else ""
        said = f"has the best worst case{where}: {100 * held.mean:.1f} % under {held.attack}"
        honest = grid.score(best, BENIGN)
        said += "." if honest is None else f", and {100 * honest.mean:.1f} % without an attack."
        said += _bans_in_words(grid.lines[best, held.attack])
        fell = [(setting, worst) for setting, worst in others if held.mean - worst.mean >= _WORTH_NAMING][-3:]
        alike = len({worst.attack for _, worst in fell}) == 1
        told = [
            f"{setting} {'' if i else 'falls '}to {_in_points(worst, alike)}"
            for i, (setting, worst) in enumerate(fell)
        ]
        when = f"Under {fell[0][1].attack}" if told and alike else "In its worst case"
        said += f" {when} {_listed(told)}." if told else " No other setting is more than 1 point lower."
        second, runner_up = others[0]
        if held.spread is None:
            return best, said + " There is one seed each, so the order may be chance."
        return best, said + _lead(
            best, second, held.mean - runner_up.mean, max(held.spread, runner_up.spread or 0.0)
        )
    return None


def _in_points(score: Score, known: bool) -> str:
    return f"{100 * score.mean:.1f} %" + ("" if known else f" ({score.attack})")


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _lost(line: SettingRuns) -> float:
    return -(line.mean("attack/lost") or 0.0)


def _bans_in_words(line: SettingRuns) -> str:
    missed, wronged = line.mean("detection/fnr"), line.mean("detection/fpr")
    if missed is None or wronged is None or missed == 1 and wronged == 0:
        return ""
    who = "every attacker" if missed == 0 else f"{100 * (1 - missed):.0f} % of the attackers"
    drawn = any(
        not isinstance(record.manifest["malicious"], list) for record in line.records
    )  # then rates are of all rounds' decisions
    did = "Round by round it bans or rejects" if drawn else "It bans"
    return (
        f" {did} {who} and {'no benign client' if wronged == 0 else f'{100 * wronged:.0f} % of the others'}."
    )


def bans(lines: Sequence[SettingRuns], by_attack: SettingsByAttack) -> Section | None:
    """When each setting banned which clients: a dot per ban, full for an attacker, hollow for a benign
    client."""
    shown = [
        (by_attack.place(line), line, _bans_of(line))
        for line in lines
        if any(record.bans for record in line.records)
    ]
    if not shown:
        return None
    last, high = max(record.rounds for line in lines for record in line.records), 52

    def share(round: int) -> float:
        return (round - 1) / max(last - 1, 1)

    drawn = []
    for place, line, banned in shown:
        marks: list[Markup] = []
        for round in sorted({when for when, *_ in banned}):
            now = [entry for entry in banned if entry[0] == round]
            up = stacked(len(now), high - 10, 8.0)
            for i, (_, rightly, about) in enumerate(now):
                kind = "banned" if rightly else "wronged"
                marks.append(dot(kind, share(round), high / 2 + up(i), about))
        drawn.append(Row(line_class(place), place, line.label, marks))
    ticks = [(share(tick), str(tick)) for tick in round_ticks(1, last)]
    chart = row_chart(drawn, high, ticks, "Bans by round, a row per setting", "round")
    counts = [
        sum(rightly == kind for _, _, banned in shown for _, rightly, _ in banned) for kind in (True, False)
    ]
    several_seeds = max(line.seeds for line in lines) > 1
    body = fill("sections/bans.html", counts=counts, several_seeds=several_seeds, chart=chart)
    rows = [(place, line.label, [entry[:2] for entry in banned]) for place, line, banned in shown]
    return Section("Bans", body, [run_plots.bans(rows, last)])


def _bans_of(line: SettingRuns) -> list[tuple[int, bool, str]]:
    """Round, whether the client was malicious, and the ban in words."""
    found = []
    for record in line.records:
        for part in record.parts:
            bad = set(record.run.malicious(part["round"])) if part.get("banned") else set()
            for client, reason in part.get("banned", {}).items():
                seed = f", seed {record.seed}" if line.seeds > 1 else ""
                found.append(
                    (
                        part["round"],
                        int(client) in bad,
                        f"client {record.run.client_name(int(client))}{seed}, round {part['round']}:"
                        f" {reason}",
                    )
                )
    return sorted(found, key=lambda entry: (entry[0], not entry[1], entry[2]))
