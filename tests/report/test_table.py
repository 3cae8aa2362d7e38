from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from holdfast.core.errors import ConfigError
from holdfast.report.read_runs import by_setting, one_each, read_records
from holdfast.report.table import (
    ALWAYS,
    COSTS,
    UNDER_ATTACK,
    Entry,
    Table,
    _entry,
    narrowed,
    tabulate,
    to_markdown,
    to_rich,
)
from holdfast.results.run import name_of
from tests.report.conftest import sweep


def test_seeds_are_averaged_and_their_spread_is_told(grid: Path) -> None:
    lines = by_setting(read_records(grid))
    assert [line.label for line in lines] == ["local", "fedavg", "ditto"]
    for line in lines:
        first, second = (record.final["accuracy"] for record in line.records)
        assert line.mean("accuracy") == pytest.approx((first + second) / 2)
        assert line.spread("accuracy") == pytest.approx(
            abs(first - second) / 2**0.5
        )  # n - 1 in the denominator


def test_one_line_per_run(grid: Path) -> None:
    lines = one_each(read_records(grid))
    assert len(lines) == 6 and lines[3].label == "fedavg seed=1"
    assert all(line.spread("accuracy") is None for line in lines)


def test_runs_of_one_name_are_told_apart_by_their_folders(single: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(single)
    assert [line.label for line in one_each(read_records(tmp_path))] == ["fedavg (a)", "fedavg (b)"]


def test_the_best_is_marked_once_per_column(grid: Path) -> None:
    table = tabulate(by_setting(read_records(grid)))
    accuracies = [row[1] for row in table.rows]
    assert [entry.best for entry in accuracies] == [
        entry.value == max(e.value or 0 for e in accuracies) for entry in accuracies
    ]
    assert not any(row[-1].best for row in table.rows)  # shared time does not rank methods


def test_the_best_is_the_best_of_those_that_faced_the_same(duel: Path) -> None:
    lines = by_setting(read_records(duel))
    table = tabulate(lines)
    for attack in ("none", "ipm", "sign-flip"):
        named = [name_of(line.records[0].config["attack"]) or "none" for line in lines]
        mine = [row[1] for name, row in zip(named, table.rows, strict=True) if name == attack]
        low, high = sorted(entry.value or 0 for entry in mine)
        assert [entry.best for entry in mine] == [entry.value == high != low for entry in mine]
    assert to_markdown(table).count("**") >= 2


def test_a_single_run_is_not_marked_as_best(single: Path) -> None:
    assert not any(entry.best for row in tabulate(by_setting(read_records(single))).rows for entry in row)


def test_markdown_and_terminal_have_the_same_texts(grid: Path) -> None:
    table = tabulate(by_setting(read_records(grid)))
    text = to_markdown(table)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))
    console.print(to_rich(table))
    shown = console.export_text()
    for row in table.rows:
        assert all(entry.text in text and entry.text in shown for entry in row)
    assert text.splitlines()[1] == "|---|" + "---:|" * 6


def test_metrics_have_columns_where_a_run_was_asked_for_them(tmp_path: Path) -> None:
    more = {"evaluate.metrics": [["auc"], []]}
    table = tabulate(by_setting(read_records(sweep(tmp_path / "s", sweep=more))))
    place = table.titles.index("AUC")
    assert "macro-F1" not in table.titles and table.titles[place - 1 : place + 2] == (
        "best round",
        "AUC",
        "sent",
    )
    assert [row[place].text for row in table.rows][1] == "–" and table.rows[0][place].text.endswith(" %")


def test_markdown_keeps_a_bar_inside_its_cell() -> None:
    assert (
        to_markdown(Table(("", "x"), ((Entry("a|b"), Entry("1", 1.0, True)),))).splitlines()[2]
        == "| a\\|b | **1** |"
    )


def test_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run in"):
        read_records(tmp_path)


def test_a_narrow_terminal_keeps_the_names_and_loses_columns_that_can_be_done_without() -> None:
    titles = ("", "accuracy", "worst 10 %", "pooled", "best round", "AUC", "sent", "time", "status")
    rows = tuple(
        (Entry(name), *[Entry("74.2 %")] * 7, Entry("finished"))
        for name in ("a method of some length", "ditto")
    )
    table = Table(titles, rows)
    assert narrowed(table, 200) == table
    narrow = narrowed(table, 80)
    assert narrow.titles == ("", "accuracy", "worst 10 %", "AUC", "sent", "status") and [
        len(row) for row in narrow.rows
    ] == [6, 6]
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(to_rich(narrowed(table, 60)))
    assert "a method of some length" in console.export_text()


def test_what_an_attack_cost(tmp_path: Path) -> None:
    """Against the same run without it, over the clients that are benign in the attacked one; other seeds have
    twins of their own."""
    axes = {"attack.name": ["none", "ipm"], "seed": [0, 1]}
    records = read_records(sweep(tmp_path / "s", sweep=axes))
    lines = by_setting(records)
    assert [line.label for line in lines] == ["none", "ipm"] and records[0].config["attack"] is None
    table = tabulate(lines)
    place = table.titles.index("lost")
    assert (
        table.rows[0][place].text == "–" and table.titles[place + 1] == "sent"
    )  # no trigger and no detector
    for honest, attacked in zip(lines[0].records, lines[1].records, strict=True):
        (malicious,) = attacked.manifest["malicious"]
        means = []
        for record in (honest, attacked):
            frame = record.run.clients()
            means.append(
                frame.loc[(frame.client != malicious) & (frame.samples > 0), "accuracy/global"].mean()
            )
        assert (
            attacked.final["attack/lost"] == pytest.approx(means[0] - means[1])
            and "attack/lost" not in honest.final
        )
    assert lines[1].mean("attack/lost") == table.rows[1][place].value
    assert (
        read_records(lines[1].records[0].path)[0].final.get("attack/lost") is None
    )  # alone, it has nothing to be compared with


def test_who_lost_most_or_sent_most_is_not_the_best() -> None:
    line: Any = SimpleNamespace(spread=lambda metric: None)
    known = {column.title: column for column in (*ALWAYS, *UNDER_ATTACK, *COSTS)}
    figures = (0.1, 0.4, 0.2)
    best = {
        title: [_entry(known[title], line, value, figures).best for value in figures]
        for title in ("accuracy", "lost", "sent")
    }
    assert best["accuracy"] == [False, True, False] and not best["lost"][1] and not best["sent"][1]


def test_one_experiment_is_not_several_seeds(tmp_path: Path) -> None:
    """Without an attack its fraction means nothing, so the grid has the same run twice; the spread is over
    two seeds all the same."""
    axes = {"attack.name": ["none", "ipm"], "attack.fraction": [0.25, 0.5], "seed": [0, 1]}
    honest, *attacked = by_setting(
        read_records(sweep(tmp_path / "s", train={"rounds": 1, "local_epochs": 1}, sweep=axes))
    )
    assert honest.seeds == 2 and [line.seeds for line in attacked] == [2, 2]
    assert all(line.mean("attack/lost") is not None for line in attacked)


def test_columns_of_attacks_only_where_there_are_any(grid: Path) -> None:
    assert not {"lost", "ASR", "DAcc"} & set(tabulate(by_setting(read_records(grid))).titles)


def test_success_of_a_backdoor_by_model_where_a_method_has_several(tmp_path: Path) -> None:
    attack = {"name": "backdoor", "size": 2, "fraction": 0.3}
    records = read_records(
        sweep(tmp_path / "s", attack=attack, train={"rounds": 1}, sweep={"method.name": ["fedavg", "ditto"]})
    )
    fedavg, ditto = by_setting(records)
    both = tabulate([fedavg, ditto])
    place = both.titles.index("ASR")
    assert both.titles[place : place + 3] == ("ASR", "ASR global", "ASR personal")
    assert [entry.text == "–" for entry in both.rows[0][place : place + 3]] == [False, False, True]
    assert both.rows[1][place].value == both.rows[1][place + 2].value
    assert "ASR global" not in tabulate([fedavg]).titles and "ASR" in tabulate([fedavg]).titles


def test_matching_has_a_column_where_partners_are_known(grid: Path, tmp_path: Path) -> None:
    pairs = {
        "clients": 4,
        "partition": {"name": "complementary-pairs", "samples_per_client": 20, "ratio": 0.8},
    }
    table = tabulate(
        by_setting(
            read_records(sweep(tmp_path / "s", data=pairs, sweep={"method.name": ["ditto", "fedcom"]}))
        )
    )
    place = table.titles.index("matched")
    assert [row[place].text for row in table.rows][0] == "–" and table.rows[1][place].text.endswith(" %")
    assert "matched" not in tabulate(by_setting(read_records(grid))).titles


def test_titles_are_words_and_no_markup() -> None:
    """They may be somebody's settings."""
    console = Console(width=80, file=io.StringIO())
    console.print(to_rich(Table(("[/x]", "[bold]"), ((Entry("[/y]"), Entry("1")),)), "of [/z]"))
    assert isinstance(console.file, io.StringIO) and all(
        word in console.file.getvalue() for word in ("[/x]", "[bold]", "[/y]", "of [/z]")
    )
