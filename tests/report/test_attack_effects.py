"""What a page says about attacks: who held, who fell, who was banned, and not more than is true."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.report.attack_effects import bans, held_or_fell
from holdfast.report.page import write_page
from holdfast.report.read_runs import by_setting, read_records
from holdfast.report.settings_by_attack import SettingsByAttack
from holdfast.report.table import tabulate
from holdfast.report.table_exports import export
from tests.report.conftest import sweep, text_of

LONG = {"name": "replacement", "clients": [2], "factor": 1000.0}


def line(label: str, accuracy: float, lost: float, told: Any = (), **detection: float) -> Any:
    figures = {
        "accuracy": accuracy,
        "attack/lost": lost,
        **{f"detection/{name}": value for name, value in detection.items()},
    }
    record = SimpleNamespace(manifest={"malicious": told if told is None else list(told)})
    return SimpleNamespace(label=label, mean=figures.get, seeds=1, records=(record,))


def test_the_best_under_attack_and_what_it_cost_the_others() -> None:
    lines = [line("a", 0.2, 0.7), line("b", 0.9, 0.02, [1], fnr=0.0, fpr=0.25), line("c", 0.8, 0.005)]
    name, said = held_or_fell(lines)
    assert (
        name == "b"
        and said
        == "classifies 90.0 % of a benign client's test samples correctly under attack, 2.0 points less than"
        " the same clients reach without it. It bans every attacker and 25 % of the others."
        " The attack costs a 70.0 points. There is one seed each, so the order may be chance."
    )


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (0.0, "as many as the same clients reach without it"),
        (-0.03, "3.0 points more than the same clients reach without it"),
    ],
)
def test_an_attack_that_costs_nothing(lost: float, words: str) -> None:
    assert f"under attack, {words}." in held_or_fell([line("a", 0.9, lost)])[1]


def test_where_attackers_change_a_decision_need_not_be_a_ban() -> None:
    said = held_or_fell([line("a", 0.9, 0.0, None, fnr=0.5, fpr=0.1)])[1]
    assert (
        "Round by round it bans or rejects 50 % of the attackers and 10 % of the others." in said
        and "It bans" not in said
    )


def circles(text: str) -> list[tuple[str, str]]:
    return re.findall(r'<circle class="(banned|wronged)"[^>]*><title>([^<]*)</title>', text)


def test_bans_of_attackers_and_of_others(tmp_path: Path) -> None:
    """One is caught in the first round; a bound that all clients exceed bans the rest, attack or not."""
    method = {"name": "fedcap", "t_unit": "absolute"}
    out = sweep(tmp_path / "s", method=method, sweep={"attack": ["none", LONG], "method.t_norm": [5.0, 1e-6]})
    lines = by_setting(read_records(out))
    dots = [circles(text_of(bans([one], SettingsByAttack(lines)))) for one in lines]
    assert (
        dots[0] == [] and bans(lines[:1], SettingsByAttack(lines)) is None
    )  # no attack, and a bound that all keep to
    assert [kind for kind, _ in dots[1]] == ["wronged"] * 4
    assert [(kind, about.split(":")[0]) for kind, about in dots[2]] == [("banned", "client 2, round 1")]
    two = [(kind, about.split(":")[0]) for kind, about in dots[3]][:2]
    assert two == [("banned", "client 2, round 1"), ("wronged", "client 0, round 1")]
    assert (
        "full for an attacker (2), hollow for a benign client (7). A ban is permanent."
        in write_page(out).read_text()
    )


def test_bans_where_attackers_are_drawn_for_every_round(tmp_path: Path) -> None:
    attack = {"name": "replacement", "fraction": 0.25, "factor": 1000.0, "redraw": True}
    out = sweep(tmp_path / "s", method={"name": "fedcap", "t_norm": 5.0}, sweep={"attack": ["none", attack]})
    record = read_records(out)[1]
    (first,) = record.run.malicious(1)
    found = circles(write_page(out).read_text())
    assert ("banned", f"client {first}, round 1") in [(kind, about.split(":")[0]) for kind, about in found]
    assert {kind for kind, _ in found} == {"banned"}


def test_a_detector_that_bans_nobody_has_no_detection_accuracy(tmp_path: Path) -> None:
    """The bound is far too high for this attack: no client is banned. 3 of 4 clients are rightly not banned,
    but 75 % would look like success."""
    attack = {"name": "sign-flip", "clients": [2]}
    found = {}
    for method in ("fedavg", "fedcap"):
        out = sweep(tmp_path / method, method={"name": method}, sweep={"attack": ["none", attack]})
        found[method] = tabulate(by_setting(read_records(out)))
    assert "DAcc" not in found["fedavg"].titles
    records = read_records(tmp_path / "fedcap")
    entry = found["fedcap"].rows[1][found["fedcap"].titles.index("DAcc")]
    assert (entry.text, entry.value) == ("no detection", None)
    assert records[1].final["detection/dacc"] == 0.75  # as papers count it
    rows = list(csv.DictReader(io.StringIO(export(by_setting(records), "csv"))))
    assert rows[1]["DAcc"] == "" and "no detection" in export(by_setting(records), "latex")


def test_a_lead_within_the_spread_is_said_of_one_attack_too() -> None:
    def seeded(label: str, accuracy: float, data: str = "digits") -> Any:
        one = line(label, accuracy, 0.0)
        one.seeds, one.spread, one.records[0].config = 3, {"accuracy": 0.02}.get, {"data": data}
        return one

    assert held_or_fell([seeded("a", 0.9), seeded("b", 0.89)])[1].endswith(
        "The lead of a over b is within the spread over seeds."
    )
    assert held_or_fell([seeded("a", 0.9), seeded("b", 0.9)])[1].endswith(" b has exactly the same accuracy.")
    assert "lead" not in held_or_fell([seeded("a", 0.9), seeded("b", 0.8)])[1]
    assert "lead" not in held_or_fell([seeded("a", 0.9), seeded("b", 0.89, "mnist")])[1]
