"""Servers, attacks and screening on a device of their own: the pretended GPU refuses to mix its tensors with
the host's, and counts what crosses. Clients train on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from holdfast.engine.client_stack import ClientStack
from holdfast.experiment import runner
from holdfast.methods import fedgc
from holdfast.storage import store
from holdfast.storage.store import PreparedRound
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
        uncounted(store, "_pack")
        uncounted(PreparedRound, "copy")
        patch.setattr(runner, "home_of", lambda plan, device: gpu.device)
        yield gpu


def case(name: str, **settings: Any) -> dict[str, Any]:
    return hard(
        name,
        method={"name": name, **settings},
        attack={"name": "sign-flip", "fraction": 0.3},
        engine={"plan": "vmap"},
    )


MODEL = 8 * 470
"""Bytes of the network, about."""
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
    assert gpu.started and gpu.largest_read < MODEL, "a whole model came to the host"


def test_experiments_are_attacked_screened_and_aggregated_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four experiments start hardly more operations on the device than one does, and read hardly more
    often."""
    started, reads = [], []
    tables = [
        case("ditto")
        | {
            "seed": seed,
            "attack": {"name": "lie", "fraction": 0.3},
            "aggregator": {"name": "multi-krum", "f": 1, "wrap": ["clip"]},
            "data": {"clients": 8},
        }
        for seed in range(4)
    ]
    there = run_all(tables, tmp_path / "host")
    for count in (1, 4):
        with servers_on_device(monkeypatch) as gpu:
            here = run_all(tables[:count], tmp_path / f"device{count}")
        for one, other in zip(there, here, strict=False):
            assert_same(everything(one), everything(other), 1e-10)
        started.append(sum(gpu.started.values()))
        reads.append(gpu.reads)
    assert started[1] < 2 * started[0] and reads[1] < 2 * reads[0]
