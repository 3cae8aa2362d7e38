"""Attacks on updates, made on class means: each class is a matter of those who hold it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.attacks import Adversary, Attack
from holdfast.attacks.own_training import OwnTraining
from holdfast.attacks.target import Target
from holdfast.core.errors import RunError
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.core.types import Field, Schema, Uplink
from holdfast.results.run import Run
from tests.checks.method_cases import hard
from tests.helpers import built_in, everything

MEANS, HELD = Field("feature", (2, 2)), Field("count", (2,), low=0)
SCHEMA: Schema = {"prototypes": MEANS, "held": HELD, "loss": Field("scalar")}
HONEST = torch.tensor(
    [[[1.0, 0.0], [4.0, 2.0]], [[3.0, 4.0], [0.0, 0.0]], [[5.0, 2.0], [2.0, 8.0]], [[-2.0, 6.0], [6.0, 5.0]]]
).double()
UP = Uplink(
    torch.tensor([0, 2, 3, 6]),
    {
        "prototypes": HONEST,
        "held": torch.tensor([[1.0, 1.0], [5.0, 0.0], [1.0, 2.0], [3.0, 3.0]]),
        "loss": torch.zeros(4),
    },
)
"""Clients 2 and 6 attack; 2 has nothing of class 1."""
ON_UPDATES = [
    name
    for name, part in built_in("attack").items()
    if "update" in part.kinds and not issubclass(part, OwnTraining)
]


def adversary(name: str, **settings: Any) -> Adversary:
    made = Adversary(build("attack", {"name": name, "clients": (2, 6), **settings}), torch.arange(10), Key(0))
    made.target = Target(build("aggregator", "median"))
    return made


def sent(name: str, up: Uplink = UP, **settings: Any) -> Tensor:
    """What the two attackers send; whatever else there is must be as it was."""
    after = adversary(name, **settings).poison("train", SCHEMA, up, Key(1))
    assert torch.equal(after["prototypes"][[0, 2]], up["prototypes"][[0, 2]]) and torch.equal(
        up["prototypes"], HONEST
    )
    assert all(after[field] is up[field] for field in ("held", "loss"))
    return after["prototypes"][[1, 3]]


def test_own_means_turned_around() -> None:
    assert sent("sign-flip").tolist() == [[[-3, -4], [0, 0]], [[2, -6], [-6, -5]]]


def test_the_cohort_of_a_class_is_the_clients_that_hold_it() -> None:
    """Class 0 is held by four, class 1 by three of them: client 2 is neither counted there nor says anything
    of it."""
    assert sent("replacement").tolist() == [[[12, 16], [0, 0]], [[-8, 24], [18, 15]]]
    # benign means: (3, 1) of class 0, (3, 5) of class 1; four and three clients
    assert sent("ipm").tolist() == [[[-12, -4], [0, 0]], [[-12, -4], [-9, -15]]]
    assert sent("mimic").tolist() == [[[1, 0], [0, 0]], [[1, 0], [4, 2]]]


def test_spread_is_that_of_the_holders() -> None:
    """Class 1: values 4, 2, 6 and 2, 8, 5: means 4 and 5, deviations 2 and 3."""
    said = sent("lie", z=0.5)
    torch.testing.assert_close(said[1, 1], torch.tensor([3.0, 3.5]).double())
    torch.testing.assert_close(said[0, 0], HONEST[:, 0].mean(0) - 0.5 * HONEST[:, 0].std(0))
    assert said[0, 1].tolist() == [0, 0]


def test_noise_differs_between_classes_and_clients() -> None:
    said = sent("gaussian", up=replace(UP, fields={**UP.fields, "held": torch.ones(4, 2)}))
    assert len(said.flatten().unique()) == said.numel()
    with pytest.raises(RunError, match='none was; set attack.scale = "absolute"'):
        sent("gaussian", scale="model")  # what was sent down, if anything, is no feature


@pytest.mark.parametrize("name", ON_UPDATES)
def test_every_attack_on_updates_reaches_means_and_leaves_absent_classes_alone(name: str) -> None:
    said = sent(name)
    assert bool(torch.isfinite(said).all()) == (name != "not-finite") and said[0, 1].tolist() == [0, 0]
    assert not torch.equal(said, HONEST[[1, 3]])


def test_means_without_counts_belong_to_all_clients() -> None:
    after = adversary("ipm", eps=1.0).poison(
        "train", {"code": MEANS}, Uplink(UP.ids, {"code": HONEST}), Key(1)
    )
    torch.testing.assert_close(after["code"][1], -HONEST[[0, 2]].mean(0))


def test_beside_updates_they_are_attacked_only_on_request() -> None:
    """Nothing of FedPAC's changes unless it is asked for."""
    schema = {**SCHEMA, "update": Field("update", (1,))}
    up = replace(UP, fields={**UP.fields, "update": torch.ones(4, 1)})
    plain = adversary("sign-flip").poison("train", schema, up, Key(1))
    assert plain["prototypes"] is up["prototypes"] and plain["update"].flatten().tolist() == [1, -1, 1, -1]
    both = adversary("sign-flip", features=True).poison("train", schema, up, Key(1))
    assert torch.equal(both["update"], plain["update"]) and torch.equal(
        both["prototypes"][[1, 3]], sent("sign-flip")
    )


def test_an_attack_that_names_features_itself_is_left_to_it() -> None:
    class Own(Attack):
        """Knows what to do with class means."""

        kinds = frozenset({"update", "feature"})

        def uplink(self, task: str, schema: Schema, up: Uplink, view: Any, key: Key) -> dict[str, Tensor]:
            return {name: 9 * torch.ones_like(view.own(name)) for name in self.targets(schema)}

    after = Adversary(Own(clients=(2,)), torch.arange(10), Key(0)).poison("train", SCHEMA, UP, Key(1))
    assert bool((after["prototypes"][1] == 9).all())


@pytest.mark.parametrize("method", ["fedproto", "fedgh"])
def test_ipm_moves_what_all_get(method: str, simulate: Callable[..., Run]) -> None:
    """And the attackers' own counts are as they were, so nobody is thought to hold what it does not."""
    train = {"participation": 1.0, "rounds": 1}
    honest, attacked = (
        simulate(**hard(method, train=train, attack=attack))
        for attack in (None, {"name": "ipm", "clients": [1, 3]})
    )
    assert not torch.equal(honest.state()["model"], attacked.state()["model"])
    a, b = everything(honest), everything(attacked)
    assert torch.equal(a["1/verdict/tables/held"], b["1/verdict/tables/held"]) and torch.equal(
        a["rows/own"], b["rows/own"]
    )
