"""Servers, attacks and screening on a device of their own: the pretended GPU refuses to mix its tensors with
the host's, and counts what crosses. Clients train on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engine.client_stack import ClientStack
from holdfast.experiment import runner
from tests.checks.method_cases import hard
from tests.helpers import assert_same, built_in, everything, run_all
from tests.pretended_gpu import PretendedGpu, pretended_gpu


@contextmanager
def servers_on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGpu]:
    """Within, servers compute on the pretended GPU. What clients do is not counted."""
    with pretended_gpu() as gpu, monkeypatch.context() as patch:
        perform = ClientStack.perform

        def uncounted(*args: Any) -> Any:
            with gpu.not_counted():
                return perform(*args)

        patch.setattr(ClientStack, "perform", uncounted)
        patch.setattr(runner, "home_of", lambda plan, device: gpu.device)
        yield gpu


@pytest.mark.parametrize("name", list(built_in("method")))
def test_every_method_gives_the_same_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = hard(name, attack={"name": "sign-flip", "fraction": 0.3}, engine={"plan": "vmap"})
    there = run_all([table], tmp_path / "host")[0]
    with servers_on_device(monkeypatch) as gpu:
        here = run_all([table], tmp_path / "device")[0]
    assert_same(everything(there), everything(here), 1e-10)
    assert gpu.started, "nothing was computed on the device"
