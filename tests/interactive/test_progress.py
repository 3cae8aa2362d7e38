"""Progress from Python: nothing where nobody looks, bars in a terminal or a notebook."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import holdfast
from tests.experiment.sessions import TINY


class Shell:
    kernel = object()


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What a notebook would show, in order: HTML and text of every update."""
    shown: list[tuple[str, str]] = []

    def show(what: Any, display_id: bool = False) -> Any:
        shown.append((what._repr_html_(), repr(what)))
        return SimpleNamespace(update=show)

    package, display = ModuleType("IPython"), ModuleType("IPython.display")
    package.get_ipython, display.display = Shell, show  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_elsewhere_it_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    holdfast.run(TINY, out=tmp_path / "run")
    assert capfd.readouterr() == ("", "")


def test_a_notebook_shows_a_bar(tmp_path: Path, outputs: list[tuple[str, str]]) -> None:
    run = holdfast.run(TINY, out=tmp_path / "run")
    html, text = outputs[-1]
    assert '<progress value="2" max="2">' in html and f"accuracy {run.accuracy:.3f}" in html
    assert text.startswith("ditto 2/2")
    del outputs[:]
    holdfast.run(TINY, out=tmp_path / "quiet", progress=False)
    assert outputs == []


def test_a_terminal_shows_a_bar_for_every_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    holdfast.sweep(TINY, out=tmp_path / "s", seed=[0, 1])
    shown = capsys.readouterr().err
    assert "seed=0" in shown and "seed=1" in shown and "2/2" in shown
