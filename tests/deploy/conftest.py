from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from holdfast.cli import main


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the doctor says of a federation must not depend on how full the disk is that happens to carry the
    tests."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=50e9))


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`holdfast federation ...` in this process: exit code, what it printed, what it complained about."""

    def go(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["federation", *map(str, args)])
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return go
