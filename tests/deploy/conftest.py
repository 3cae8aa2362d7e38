from __future__ import annotations

from types import SimpleNamespace

import pytest


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the doctor says of a federation must not depend on how full the disk is that happens to carry the tests."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=50e9))
