"""Servers, attacks and screening on a device of their own: the pretended GPU refuses to mix its tensors with
the host's, and counts what crosses. Clients train on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.engine.client_stack import ClientStack
from holdfast.experiment import runner
from holdfast.methods import fedgc
from holdfast.storage.store import Store
from tests.checks.method_cases import hard
from tests.helpers import assert_same, built_in, everything, run_all
from tests.pretended_gpu import PretendedGpu, pretended_gpu


@contextmanager
def servers_on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGpu]:
    """Within, servers compute on the pretended GPU. What clients do, and what is saved, is not counted."""
    with pretended_gpu() as gpu, monkeypatch.context() as patch:

        def uncounted(of: Any, name: str) -> None:
            work = getattr(of, name)

            def quietly(*args: Any, **kwargs: Any) -> Any:
                with gpu.not_counted():
                    return work(*args, **kwargs)

            patch.setattr(of, name, quietly)

        def corrected_on_host(rows: Tensor, held: Tensor, alike: bool) -> Tensor:
            with gpu.not_counted():  # autograd does not run on the pretended GPU
                return correction(rows.cpu(), held.cpu(), alike).to(gpu.device)

        correction = fedgc.correction
        patch.setattr(fedgc, "correction", corrected_on_host)
        uncounted(ClientStack, "perform")
        uncounted(Store, "prepare")
        patch.setattr(runner, "home_of", lambda plan, device: gpu.device)
        yield gpu


def case(name: str, **settings: Any) -> dict[str, Any]:
    return hard(
        name,
        method={"name": name, **settings},
        attack={"name": "sign-flip", "fraction": 0.3},
        engine={"plan": "vmap"},
    )


CASES = {name: case(name) for name in built_in("method")} | {
    "fedcap, customised reference": case("fedcap", reference="customised", similarity="head"),
    "fedcap, authors": case("fedcap", variant="authors", phi="uniform"),
    "fedcom, gradient": case("fedcom", signal="gradient", order="sequential"),
    "fedas, authors": case("fedas", variant="authors"),
    "c-pfl, previous": case("c-pfl", missing_mass="previous"),
}


@pytest.mark.parametrize("name", list(CASES))
def test_every_method_gives_the_same_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = run_all([CASES[name]], tmp_path / "host")[0]
    with servers_on_device(monkeypatch) as gpu:
        here = run_all([CASES[name]], tmp_path / "device")[0]
    assert_same(everything(there), everything(here), 1e-10)
    model = next(
        (value for key, value in everything(there).items() if key.startswith("server/model")),
        torch.zeros(500),
    )
    print(
        name,
        dict(reads=gpu.reads, largest=gpu.largest_read, started=sum(gpu.started.values())),
        model.numel() * 8,
    )
