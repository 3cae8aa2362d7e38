from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks.attack_cases import QUICK
from tests.helpers import run_all


@pytest.mark.parametrize("name", ["bad-pfl", "pfedba"])
def test_a_gradient_through_a_network_with_running_statistics(name: str, tmp_path: Path) -> None:
    """A step that takes it must not change them in place."""
    attack = {"name": name, "fraction": 0.4, **QUICK[name]}
    (run,) = run_all([{"attack": attack, "model": "cnn-bn", "train": {"rounds": 1}}], tmp_path)
    assert run.final["attack/asr"] is not None
