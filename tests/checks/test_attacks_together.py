"""Every registered attack, in every variant and with every knowledge: several experiments attacked at once,
and on a device, send what each sends alone on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.attacks import Adversary, View, several
from holdfast.attacks.several import Situation, Views
from holdfast.attacks.sign_flip import SignFlip
from holdfast.core.errors import RunError
from holdfast.core.keys import Key
from holdfast.core.together import in_lockstep
from holdfast.core.types import Schema, Uplink
from tests.checks.attack_cases import CASES, CLIENTS, EXPERIMENTS, IDS, NAMED, World
from tests.helpers import built_in, some_now
from tests.pretended_gpu import pretended_gpu

of_every_variant = pytest.mark.parametrize("settings", some_now(NAMED))
DEFAULTS = [place for place, case in enumerate(CASES) if set(case) == {"name", "knows", "features"}]
of_every_default = pytest.mark.parametrize(
    "settings", [CASES[place] for place in DEFAULTS], ids=[IDS[place] for place in DEFAULTS]
)
every_attack = pytest.mark.parametrize("name", built_in("attack"))


def assert_equal(found: list[Uplink], expected: list[Uplink], names: set[str] | None = None) -> None:
    for one, other in zip(found, expected, strict=True):
        for name in names or set(other.fields):
            torch.testing.assert_close(
                one[name].cpu(), other[name].cpu(), rtol=1e-12, atol=1e-12, equal_nan=True
            )


def never_alone(self: Any) -> Any:
    raise AssertionError("an experiment was attacked on its own")


def assert_together_equals_one_by_one(world: World) -> None:
    before = world.stack.clone()
    expected, notes = world.one_by_one(), world.notes()
    assert_equal(world.together(), expected)
    assert world.notes() == notes and torch.equal(world.stack, before)


@of_every_variant
def test_together_equals_one_by_one(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(settings)
    assert_together_equals_one_by_one(world)
    expected = world.one_by_one()
    changed = [not torch.equal(e["update"], up["update"]) for e, up in zip(expected, world.ups, strict=True)]
    assert set(changed) == {"update" in world.attack.kinds}
    if not world.attack.has_batched_form():
        return
    # who holds a class differs from one experiment to the next, so class means may be attacked alone
    world = World({**settings, "features": False})
    monkeypatch.setattr(Situation, "alone", never_alone)
    assert_equal(world.together(), expected, {"update", "count"})


@every_attack
def test_replies_written_in_place_stay_where_they_are(name: str) -> None:
    world = World({"name": name, "features": True})
    expected = world.one_by_one()
    places = [value.data_ptr() for up in world.ups for value in up.fields.values()]
    found = world.together(in_place=True)
    assert [value.data_ptr() for up in found for value in up.fields.values()] == places
    assert_equal(found, expected)


@of_every_default
def test_other_cohorts(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all clients attack, there is no row of the server's own, a stack is cut into pieces, replies lie
    in memories of their own, or updates of some clients are not finite."""
    settings = {"name": settings["name"], "knows": settings["knows"]}
    assert_together_equals_one_by_one(World(settings, fraction=1.0))
    assert_together_equals_one_by_one(World(settings, root=False))
    with monkeypatch.context() as patch:
        patch.setattr(several, "LIMIT", 2 * 8 * 12)
        assert_together_equals_one_by_one(World(settings))
    apart = World(settings)
    apart.ups = [up.having(update=up["update"].clone()) for up in apart.ups]
    assert_together_equals_one_by_one(apart)
    assert_equal(apart.together(in_place=True), World(settings).one_by_one())
    for ran_away in ([1], [1, 2], [1, 2, 3, 4, 5, 6, 7]):
        world = World(settings, d=5)
        world.ups[1]["update"][ran_away] = torch.nan
        expected = world.one_by_one()
        assert_equal(world.together(), expected)
        equal = World(settings, d=5)
        equal.stack[:] = 2.0  # clients that do not differ
        assert_together_equals_one_by_one(equal)


def test_experiments_with_other_settings_stay_apart() -> None:
    worlds = [World({"name": "sign-flip", "scale": scale}) for scale in (1.0, 2.0)]
    worlds += [World({"name": name}) for name in ("lie", "backdoor", "min-max")]
    expected = [up for world in worlds for up in world.one_by_one()]
    assert_equal(in_lockstep([g for world in worlds for g in world.generators()], batch=True), expected)


def test_a_class_that_changes_only_the_single_form_is_computed_alone() -> None:
    class Twice(SignFlip):
        """Sends twice the update."""

        def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> dict[str, Tensor]:
            return {name: 2 * view.own(name) for name in self.targets(schema)}

    world = World({"name": "sign-flip"})
    world.adversaries = [
        Adversary(Twice(clients=(place,)), torch.arange(CLIENTS), Key(0)) for place in range(EXPERIMENTS)
    ]
    assert SignFlip.has_batched_form() and not Twice.has_batched_form()
    for place, (found, up) in enumerate(zip(world.together(), world.ups, strict=True)):
        assert torch.equal(found["update"][place + 1], 2 * up["update"][place + 1])


def test_an_attack_that_writes_to_replies_is_found_together_and_on_a_device() -> None:
    class Vandal(SignFlip):
        """Spoils what is sent."""

        on_device = True  # else it would be given copies on the host
        knows: Any = "everyone"

        def together(self, task: str, schema: Schema, views: Views) -> dict[str, Tensor]:
            views.known("update")[:, 0] = 9.0
            return {}

        def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> dict[str, Tensor]:
            view.everyone("update")[0] = 9.0
            return {}

    def spoilt(way: str, device: Any = "cpu") -> None:
        world = World({"name": "sign-flip"}, device=device, root=False)
        world.adversaries = [
            Adversary(Vandal(clients=(2,)), torch.arange(CLIENTS), Key(0)) for _ in range(EXPERIMENTS)
        ]
        with pytest.raises(RunError, match="changed replies in place"):
            getattr(world, way)()

    spoilt("together")
    with pretended_gpu() as gpu:
        spoilt("one_by_one", gpu.device)


@of_every_variant
def test_on_a_device_as_on_the_cpu(settings: dict[str, Any]) -> None:
    """No read is as long as a row: what the host is told does not grow with the update."""
    d = 240
    settings = {**settings, "features": "features" in settings and len(settings) == 3}
    expected = World(settings, d).one_by_one()
    for way in ("one_by_one", "together"):
        with pretended_gpu() as gpu:
            found = getattr(World(settings, d, gpu.device), way)()
            assert gpu.largest_read < d * 8, gpu
            with gpu.not_counted():
                assert_equal(found, expected)
