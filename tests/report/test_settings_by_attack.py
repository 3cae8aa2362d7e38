"""Who faced whom: rows, columns and worst cases, from the words of the labels."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from holdfast.report.attack_effects import worst_cases
from holdfast.report.figures_section import headline
from holdfast.report.page import render
from holdfast.report.read_runs import by_setting, read_records
from holdfast.report.robustness_map import score_map
from holdfast.report.sections import title
from holdfast.report.settings_by_attack import BENIGN, WORST, SettingsByAttack
from holdfast.report.verdict import verdict
from tests.report.balanced_html import Balanced
from tests.report.conftest import sweep


def line(
    label: str,
    accuracy: float | None = None,
    attack: Any = None,
    data: str = "digits",
    spread: float | None = None,
) -> Any:
    """As much of a line as is asked for its place."""
    config = {
        "attack": attack,
        "method": {"name": "fedavg", "lam": 0.1},
        "data": {"name": data, "partition": {"name": "iid"}},
        "seed": 0,
    }
    record = SimpleNamespace(
        config=config, method="fedavg", path=Path(f"folder-of-{label}"), manifest={"malicious": [0]}
    )
    means = {"accuracy": accuracy}
    return SimpleNamespace(
        label=label,
        records=(record,),
        mean=means.get,
        spread=lambda metric: spread,
        seeds=1 if spread is None else 2,
    )


def test_words_of_the_label_name_rows_and_columns() -> None:
    strong, weak = ({"name": "ipm", "fraction": 0.3, "eps": eps} for eps in (10.0, 0.1))
    lines = [
        line("fedcap none fraction=0.3 lam=0.1"),
        line("fedcap ipm eps=10.0 lam=0.1", attack=strong),
        line("fedcap ipm eps=0.1 lam=0.1", attack=weak),
        line("attack={'name': 'ipm', 'eps': 10.0} seed=4", attack=strong),
        line("mnist fedcap iid", data="mnist"),
    ]
    assert [(one.setting, one.attack, one.data) for one in SettingsByAttack(lines).faced] == [
        ("fedcap lam=0.1", BENIGN, "digits"),
        ("fedcap lam=0.1", "ipm eps=10.0", "digits"),
        ("fedcap lam=0.1", "ipm eps=0.1", "digits"),
        ("fedavg", "ipm eps=10.0", "digits"),
        ("fedcap", BENIGN, "mnist iid"),
    ]


def test_two_of_one_name_are_two_rows() -> None:
    assert SettingsByAttack([line("a"), line("a")]).settings == ["a", "a (folder-of-a)"]


ATTACKS = {"x": {"name": "x"}, "y": {"name": "y"}}


def lines_of(figures: dict[tuple[str, str], float], spread: float | None = None) -> list[Any]:
    return [
        line(f"{who} {what}", value, ATTACKS.get(what), spread=spread)
        for (who, what), value in figures.items()
    ]


FIGURES = {
    ("a", "none"): 0.9,
    ("a", "x"): 0.8,
    ("a", "y"): 0.1,
    ("b", "none"): 0.7,
    ("b", "x"): 0.6,
    ("b", "y"): 0.5,
    ("c", "x"): 0.99,
}


def test_the_worst_case_is_over_attacks_and_needs_all_of_them() -> None:
    (grid,) = SettingsByAttack(lines_of(FIGURES)).grids
    assert grid.columns == (BENIGN, "x", "y", WORST) and grid.settings == ("b", "a", "c")
    worst = [(row[-1].mean, row[-1].attack) if row[-1] else None for row in grid.scores]
    assert worst == [(0.5, "y"), (0.1, "y"), None]  # c was not tried under y
    assert grid.best == [0.9, 0.99, 0.5, 0.5]
    texts = [[entry.text for entry in row] for row in grid.table().rows]
    assert texts[0] == ["b", "70.0 %", "60.0 %", "50.0 %", "50.0 %"] and texts[2] == [
        "c",
        "–",
        "99.0 %",
        "–",
        "–",
    ]


def test_a_run_without_attack_is_not_a_worst_case() -> None:
    """Where an attack happens to help, the worst case is still one of the attacks."""
    (grid,) = SettingsByAttack(lines_of({**FIGURES, ("a", "none"): 0.05, ("b", "none"): 0.2})).grids
    worst = {setting: grid.worst(setting) for setting in grid.settings}
    assert [(score.mean, score.attack) for score in (worst["a"], worst["b"]) if score] == [
        (0.1, "y"),
        (0.5, "y"),
    ]
    assert grid.settings == ("b", "a", "c")


def test_the_worst_case_decides() -> None:
    name, said = worst_cases(SettingsByAttack(lines_of(FIGURES)).grids) or ("", "")
    assert (
        name == "b"
        and said
        == "has the best worst case: 50.0 % under y, and 70.0 % without an attack. Under y a"
        " falls to 10.0 %. There is one seed each, so the order may be chance."
    )
    close = {**FIGURES, ("a", "y"): 0.48}
    assert (
        "The lead of b over a is within the spread over seeds."
        in (worst_cases(SettingsByAttack(lines_of(close, 0.05)).grids) or ("", ""))[1]
    )
    assert (
        worst_cases(SettingsByAttack(lines_of({key: v for key, v in FIGURES.items() if key[1] != "y"})).grids)
        is None
    )  # one attack only


def test_the_map_says_whose_accuracy_its_columns_have() -> None:
    lines = lines_of(FIGURES)
    assert (
        "that column has more clients than the others. A stronger colour"
        in headline(lines, SettingsByAttack(lines)).body
    )
    attacked_only = [one for one in lines if one.records[0].config["attack"]]
    assert "that column" not in headline(attacked_only, SettingsByAttack(attacked_only)).body


def test_cells_of_the_map_carry_their_values_and_the_best_is_marked_in_words() -> None:
    (grid,) = SettingsByAttack(lines_of(FIGURES, 0.012)).grids
    text = score_map(grid)
    Balanced(text)
    scores = re.findall(r'<text class="score( best)?"[^>]*>([^<]*)</text>', text)
    assert [shown for _, shown in scores] == [
        "70.0 %",
        "60.0 %",
        "50.0 % ★",
        "50.0 % ★",
        "90.0 % ★",
        "80.0 %",
        "10.0 %",
        "10.0 %",
        "99.0 % ★",
    ]
    assert all(("★" in shown) == bool(best) for best, shown in scores)
    assert text.count("± 1.2") == 2 * 9 and "± 1.2 · y" in text and text.count('role="cell"') == 3 * 4


def test_of_many_settings_those_that_hold_best_are_highlighted(tmp_path: Path) -> None:
    by_attack = SettingsByAttack(lines_of({(f"s{i}", "x"): i / 20 for i in range(10)}))
    assert (
        by_attack.many
        and by_attack.settings[:2] == ["s9", "s8"]
        and by_attack.place(by_attack.faced[9].line) == 0
    )
    axes = {"train.lr": [0.01 * i for i in range(1, 10)]}
    text = render(read_records(sweep(tmp_path / "s", train={"rounds": 1, "local_epochs": 1}, sweep=axes)))
    assert (
        text.count('class="key" aria-pressed="true"') == 8
        and text.count('class="key" aria-pressed="false"') == 1
    )
    assert len(re.findall(r'<g class="c\d d\d muted"', text)) == 2  # its accuracy and its loss


def test_the_page_of_a_duel(duel: Path) -> None:
    records = read_records(duel)
    lines = by_setting(records)
    by_attack, text = SettingsByAttack(lines), render(records)
    Balanced(text)
    assert title(lines, by_attack) == "fedavg and fedcap under 2 attacks on digits"
    (grid,) = by_attack.grids
    assert verdict(lines)[0] == grid.settings[0] and grid.columns == (BENIGN, "ipm", "sign-flip", WORST)
    for score, entry in zip(grid.scores[0], grid.table().rows[0][1:], strict=True):
        assert (
            score is not None and entry.text == f"{100 * score.mean:.1f} ± {100 * (score.spread or 0):.1f} %"
        )
    assert text.count('<text class="score') == 2 * 4 and text.index(
        "Accuracy under attack</h2>"
    ) < text.index("Over the rounds</h2>")
    assert [found for found in re.findall(r'data-chart="(accuracy/\d)"', text)] == [
        "accuracy/0",
        "accuracy/1",
        "accuracy/2",
    ]
    assert "Accuracy under sign-flip" in text and text.count('class="key"') == 2
    assert (
        "Cost</h2>" in text
        and "fedcap ipm, to the server: " in text
        and "Cost</h2>" not in render(records[:1])
    )


def test_a_map_for_each_way_the_data_is_dealt(tmp_path: Path) -> None:
    axes = {
        "data.partition.beta": [0.3, 0.9],
        "method.name": ["fedavg", "local"],
        "attack.name": ["none", "ipm"],
    }
    records = read_records(sweep(tmp_path / "s", train={"rounds": 1, "local_epochs": 1}, sweep=axes))
    grids = SettingsByAttack(by_setting(records)).grids
    assert [grid.data for grid in grids] == ["digits beta=0.3", "digits beta=0.9"]
    assert all(grid.columns == (BENIGN, "ipm") for grid in grids)  # a single attack is its own worst case
    assert "<h3>digits beta=0.9</h3>" in render(records)
