"""The tables of `run.table` as figures: benign and malicious clients over the rounds, matrices of one round,
bans and rejections."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from holdfast.core.errors import ConfigError
from holdfast.core.recorded_table import RecordedTable
from holdfast.report.axis import Point
from holdfast.report.charts import Series
from holdfast.report.diagnosis import CurvesFigure, Diagnosis, MatrixFigure
from holdfast.results.run import Run, name_of

_MEGABYTE = 1e6
_ROWS = 12  # of a short table


def diagnose(run: Run, what: str, round: int | None = None) -> Diagnosis:
    """One of the run's tables. `round`: which one a matrix is shown of, by default the last that has it."""
    frame, about = run.table(what), run.tables[what]
    title, note = f"{what}: {name_of_run(run)}", about[0].upper() + about[1:] + "."
    if frame.empty:
        raise ConfigError(f"{run.path}: the table '{what}' is empty in every round")
    if what == "turned-away":
        return _turned_away(run, frame, title, note)
    if "part" in frame:
        return _parts(frame, what, title, note)
    if run.declared_tables.kind(what) == "members":
        return _members(run, frame, title, note)
    if "class" in frame:
        return _matches(run, frame, title, note, _round(frame, round))
    if "other" in frame:
        return _pairs(run, frame, title, note, _round(frame, round), what)
    return _over_rounds(run, frame, what, title, note)


def name_of_run(run: Run) -> str:
    """The name of a run in a title: its label in a sweep, else the method, the rule where it is not the plain
    mean, and the attack."""
    config = run.manifest["config"]
    rule, attack = name_of(config["aggregator"]), name_of(config["attack"])
    words = f"{name_of(config['method'])}{f' with {rule}' if rule not in (None, 'mean') else ''}{f' under {attack}' if attack else ''}"  # noqa: E501
    return run.manifest["label"] if len(run.manifest["group"]) > 1 else words


def _over_rounds(run: Run, frame: pd.DataFrame, what: str, title: str, note: str) -> Diagnosis:
    """Median and range of both kinds of client."""
    declared = run.declared_tables.find(what) or RecordedTable("")
    share, mean, beside = declared.share, declared.kind == "flags", what.rpartition("/")[0]
    usable = frame[np.isfinite(frame["value"])]
    lost = (
        f" {len(frame) - len(usable)} values that are not finite are left out."
        if len(usable) < len(frame)
        else ""
    )
    if "client" not in frame:
        series = [Series(what.rsplit("/", 1)[-1], _points(usable))]
        return Diagnosis(title, frame, _some(frame), [CurvesFigure(title, note + lost, series, share)])
    series, short = [], pd.DataFrame({"round": sorted(frame["round"].unique())})
    for name, rows in _kinds(usable):
        points = _points(rows, mean=mean)
        series.append(Series(name, points))
        columns = ["round", name, f"{name} least", f"{name} most"]
        short = short.merge(pd.DataFrame(points, columns=columns), on="round", how="left")
    if declared.bound:
        threshold = run.table(f"{beside}/{declared.bound}")
        series.append(Series("threshold", _points(threshold)))
        short = short.merge(threshold.rename(columns={"value": "threshold"}), on="round", how="left")
    more = _sittings(run, f"{beside}/{declared.given_by}") if declared.given_by else []
    middle = "Mean" if mean else "Median and range over the clients"
    return Diagnosis(
        title, frame, _some(short), [CurvesFigure(title, f"{note} {middle}.{lost}", series, share), *more]
    )


def _sittings(run: Run, what: str) -> Sequence[MatrixFigure]:
    """The members that gave the scores."""
    frame = run.table(what)
    return [_calendar(run, frame, what, "Members of the committee.", lambda row: 1.0)] if len(frame) else []


def _kinds(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    if not frame["malicious"].any():
        return [("clients", frame)]
    return [("benign", frame[~frame["malicious"]]), ("malicious", frame[frame["malicious"]])]


def _points(frame: pd.DataFrame, mean: bool = False) -> list[Point]:
    """One for each round: middle, least and most; of a mean, three times the same."""
    by_round = frame.groupby("round")["value"]
    found = [by_round.mean()] * 3 if mean else [by_round.median(), by_round.min(), by_round.max()]
    return [
        (int(round), float(middle), float(low), float(high))
        for round, middle, low, high in zip(found[0].index, *found, strict=True)
    ]


def _parts(frame: pd.DataFrame, what: str, title: str, note: str) -> Diagnosis:
    """Seconds, and traffic in both directions."""
    wide = frame.pivot(index="round", columns="part", values="value").fillna(0)
    wide = wide[list(dict.fromkeys(frame["part"]))]
    if what == "bytes":
        wide, note = wide / _MEGABYTE, note + " In megabytes."
    series = [
        Series(str(name), [(int(r), float(v), float(v), float(v)) for r, v in wide[name].items()])
        for name in wide
    ]
    total = wide.sum().to_frame().T.assign(round="all")
    short = pd.concat([_some(wide.reset_index()), total], ignore_index=True)
    return Diagnosis(title, frame, short, [CurvesFigure(title, note, series)])


def _pairs(run: Run, frame: pd.DataFrame, title: str, note: str, round: int, what: str) -> Diagnosis:
    """A matrix of one round: whose row, whose column."""
    one = frame[frame["round"] == round]
    wide = one.pivot(index="client", columns="other", values="value")
    share, bad = run.declared_tables.share(what), set(frame.loc[frame["malicious"], "client"])
    small = 0.005 if share else 0.0  # what would read 0 stays empty
    values = [[float(v) if v > small else 0.0 for v in wide[name]] for name in wide]
    texts = [[f"{100 * v:.0f}" if share else f"{v:.2g}" for v in wide[name]] for name in wide]
    most = max((v for column in values for v in column), default=0.0) or 1.0
    legend = ("0", f"{100 * most:.3g} %" if share else f"{most:.3g}")
    words = ("model of", "member" if run.declared_tables.kind(what) == "votes" else "client")
    unit = " In per cent." if share else ""
    heads, names = _marked(run, wide.columns, bad), _marked(run, wide.index, bad)
    cells = MatrixFigure(
        title, f"{note} Round {round}.{unit}{_stars(bad)}", values, heads, names, words, texts, legend, most
    )
    return Diagnosis(title, frame, _some(_largest(one), 40), [cells.shown()])


def _largest(one: pd.DataFrame) -> pd.DataFrame:
    """A line per client: the largest entries of its row."""
    rows = []
    for client, row in one.sort_values("value", ascending=False, kind="stable").groupby("client"):
        top = ", ".join(
            f"{other}: {value:.3g}" for other, value in zip(row["other"][:4], row["value"][:4], strict=True)
        )
        rows.append({"client": client, "malicious": bool(row["malicious"].iloc[0]), "most of": top})
    return pd.DataFrame(rows)


def _matches(run: Run, frame: pd.DataFrame, title: str, note: str, round: int) -> Diagnosis:
    one = frame[frame["round"] == round]
    wide = one.pivot(index="client", columns="class", values="value")
    bad = set(frame.loc[frame["malicious"], "client"])
    values = [[0.0 if np.isnan(v) else 0.1 if v < 0 else 0.25 for v in wide[name]] for name in wide]
    texts = [["" if np.isnan(v) else "none" if v < 0 else f"{v:.0f}" for v in wide[name]] for name in wide]
    heads, names = list(map(str, wide.columns)), _marked(run, wide.index, bad)
    cells = MatrixFigure(
        title, f"{note} Round {round}.{_stars(bad)}", values, heads, names, ("class", "client"), texts
    )
    return Diagnosis(title, frame, _some(one.rename(columns={"value": "peer"}), 40), [cells.shown()])


def _members(run: Run, frame: pd.DataFrame, title: str, note: str) -> Diagnosis:
    short = (
        frame.groupby("round")["client"]
        .agg(lambda ids: ", ".join(map(str, ids)))
        .rename("members")
        .reset_index()
    )
    return Diagnosis(title, frame, _some(short), [_calendar(run, frame, title, note, lambda row: 1.0)])


def _turned_away(run: Run, frame: pd.DataFrame, title: str, note: str) -> Diagnosis:
    note += " Dark: banned for good; light: rejected for the round."
    drawn = _calendar(run, frame, title, note, lambda row: 1.0 if row.how == "banned" else 0.1)
    return Diagnosis(title, frame, _some(frame, 20), [drawn])


def _calendar(
    run: Run, frame: pd.DataFrame, title: str, note: str, shade: Callable[..., float]
) -> MatrixFigure:
    """Rounds across, clients down: a cell for every entry about a client."""
    clients, rounds = sorted(frame["client"].unique()), range(1, run.round + 1)
    values = [[0.0] * len(clients) for _ in rounds]
    for row in frame.itertuples():
        values[row.round - 1][clients.index(row.client)] = shade(row)
    texts = [[""] * len(clients) for _ in rounds]
    bad = set(frame.loc[frame["malicious"], "client"])
    heads, names = [str(round) for round in rounds], _marked(run, clients, bad)
    return MatrixFigure(title, note + _stars(bad), values, heads, names, ("round", "client"), texts).shown()


def _round(frame: pd.DataFrame, asked: int | None) -> int:
    there = sorted(frame["round"].unique())
    if asked is not None and asked not in there:
        raise ConfigError(
            f"--round: this table has rounds {there[0]} to {there[-1]}, and none for round {asked}"
        )
    return int(there[-1] if asked is None else asked)


def _marked(run: Run, ids: Sequence[int] | pd.Index, bad: set[int]) -> list[str]:
    return [f"{run.client_name(client)}{'*' if client in bad else ''}" for client in ids]


def _stars(bad: set[int]) -> str:
    return " * malicious." if bad else ""


def _some(frame: pd.DataFrame, most: int = _ROWS) -> pd.DataFrame:
    """Evenly chosen rows, first and last among them."""
    if len(frame) <= most:
        return frame
    return frame.iloc[np.unique(np.linspace(0, len(frame) - 1, most).round().astype(int))]
