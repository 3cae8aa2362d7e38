"""The figure of a sweep: panels, chosen lines, new names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.core.errors import ConfigError
from holdfast.interactive.sweep_figure import Look, sweep_figure

pytest.importorskip("matplotlib")


def line(setting: str, attack: str) -> Any:
    """As much of a line as a figure asks for."""
    config = {
        "attack": None if attack == "none" else {"name": attack},
        "method": setting,
        "data": {"name": "digits", "partition": "iid"},
    }
    record = SimpleNamespace(config=config, method=setting, path=Path(setting))
    points = [(1, 0.3, 0.2, 0.4), (2, 0.5, 0.5, 0.5)]
    return SimpleNamespace(
        label=f"{setting} {attack}", records=(record,), curve=lambda metric: points, mean=lambda metric: 0.5
    )


LINES = [line(setting, attack) for setting in ("fedavg", "ditto") for attack in ("none", "ipm")]


def texts(found: Any) -> list[str]:
    return [text.get_text() for text in found]


def test_a_panel_for_each_attack_and_one_legend() -> None:
    (figure,) = sweep_figure(LINES, "accuracy", Look(names={"ditto": "Ditto", "ipm": "IPM"})).subfigs
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["no attack", "IPM"]
    assert texts(figure.legends[0].get_texts()) == ["fedavg", "Ditto"]
    colours = [[drawn.get_color() for drawn in axes.lines] for axes in figure.axes]
    assert colours[0] == colours[1]


def test_chosen_lines_in_one_chart() -> None:
    look = Look(["ditto ipm", "fedavg none"], False, {"ditto": "Ditto"}, (4.0, 2.5))
    figure = sweep_figure(LINES, "accuracy", look)
    assert texts(figure.subfigs[0].axes[0].get_legend().get_texts()) == ["Ditto", "fedavg none"]
    assert figure.get_size_inches().tolist() == [4.0, 2.5]
    by_function = sweep_figure(LINES, "accuracy", Look(lambda label: "ipm" in label))
    assert texts(by_function.subfigs[0].axes[0].get_legend().get_texts()) == ["fedavg ipm", "ditto ipm"]


@pytest.mark.parametrize(
    ("look", "words"),
    [
        (
            Look(["dito ipm"]),
            "lines has 'dito ipm', which is no label .* did you mean 'ditto ipm'",
        ),
        (Look(lambda label: False), "no label fits lines=; the labels are fedavg none, fedavg ipm"),
        (Look([]), "lines is empty"),
        (Look(names={"dito": "x"}), "names renames 'dito', which is no label .* did you mean 'ditto'"),
    ],
)
def test_a_wrong_choice_is_refused(look: Look, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sweep_figure(LINES, "accuracy", look)


def test_too_many_lines_in_one_chart_get_advice() -> None:
    many = [line(f"m{number}", "ipm") for number in range(9)]
    with pytest.warns(UserWarning, match="one chart has 9 lines.*choose some, plot"):
        sweep_figure(many, "accuracy", Look())
