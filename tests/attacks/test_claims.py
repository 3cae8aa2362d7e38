"""One claim of the paper of each attack that trains in its own way, played on digits with ten clients: what
happens here is asserted, also where it is not what the paper says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.results.run import Run

pytestmark = pytest.mark.slow
SIDE: dict[str, Any] = {"size": 3}
ATTACKERS = [3, 7]


def play(attack: Any, rounds: int, present: tuple[int, int] | None = None, **more: Any) -> dict[str, Any]:
    """The attackers are there in rounds [from, to) only."""
    clients = attack["clients"] if isinstance(attack, dict) else []
    train = {"rounds": rounds, "batch_size": 10, "lr": 0.1, "dtype": "float32", "participation": 1.0}
    if present is not None:
        train["availability"] = {str(client): [present] for client in clients}
    return {
        "data": {"clients": 10, "partition": {"name": "dirichlet", "beta": 1.0}},
        "model": {"name": "mlp", "hidden": 32},
        "train": train,
        "attack": attack,
        **more,
    }


def at(run: Run, figure: str, round: int) -> float:
    part = run.store.part(round)
    assert part is not None
    return float(part["metrics"][figure])


def asr(run: Run, round: int) -> float:
    return at(run, "attack/asr", round)


def test_one_attacker_in_one_round_replaces_the_model(simulate_all: Callable[..., list[Run]]) -> None:
    """Bagdasaryan et al.: a single attacker in a single round gives the global model the backdoor, with the
    main task kept, where poisoned data alone do nothing. The paper's success is near 1; here it is lower,
    because the model has not converged, and benign clients undo it within a few rounds."""
    data, model = simulate_all(
        [
            play({"name": "backdoor", **SIDE, "clients": [3]}, 12, (10, 11)),
            play({"name": "constrain-and-scale", "poison": SIDE, "clients": [3], "epochs": 20}, 12, (10, 11)),
        ]
    )
    assert asr(data, 10) < 0.1 and asr(model, 9) < 0.1
    assert asr(model, 10) > 0.35 and 0.15 < asr(model, 12) < asr(model, 10)
    assert at(model, "accuracy", 10) > at(data, "accuracy", 10) - 0.02


def test_stealthy_steps_keep_the_main_task(simulate_all: Callable[..., list[Run]]) -> None:
    """Bhagoji et al.: with alternating minimisation the backdoor is planted and the main task goes on as
    without an attack; with boosting alone it suffers."""
    about = {"name": "alternating", "poison": SIDE, "clients": [3]}
    both, boosted, honest = simulate_all(
        [play(about, 4), play({**about, "stealth_epochs": 0}, 4), play("none", 4)]
    )
    assert asr(both, 2) > 0.7 and asr(boosted, 2) > 0.7
    for round in (2, 4):
        assert abs(at(both, "accuracy", round) - at(honest, "accuracy", round)) < 0.03
    assert at(boosted, "accuracy", 2) < at(honest, "accuracy", 2) - 0.1


def test_how_long_backdoors_last(simulate_all: Callable[..., list[Run]]) -> None:
    """Two of ten clients attack in rounds 6 to 11; then they are away.

    Dai and Li: Chameleon's backdoor lasts longer than a plain one; here it does. Nguyen et al.: IBA's lasts
    (it is also adversarial: its trigger is half of it). Zhang et al.: Neurotoxin's lasts longer than the same
    training without its mask; here it does not, nor where one of twenty clients attacks (not asserted): the
    small network has few coordinates that nobody needs."""
    about: dict[str, dict[str, Any]] = {
        "plain": {"name": "backdoor", **SIDE},
        "unmasked": {"name": "neurotoxin", "poison": SIDE, "top": 0.0},
        "neurotoxin": {"name": "neurotoxin", "poison": SIDE},
        "chameleon": {"name": "chameleon", "poison": SIDE},
        "iba": {"name": "iba"},
    }
    tables = [play({**attack, "clients": ATTACKERS}, 24, (6, 12)) for attack in about.values()]
    runs = dict(zip(about, simulate_all(tables), strict=True))
    planted, left = ({name: asr(run, round) for name, run in runs.items()} for round in (11, 24))
    assert min(planted.values()) > 0.4 and min(run.final["accuracy"] for run in runs.values()) > 0.92
    assert left["chameleon"] > left["plain"] + 0.05
    assert left["iba"] > 0.6 > 2 * left["plain"]
    assert left["neurotoxin"] < left["unmasked"], "else the paper's claim holds here; say so"
