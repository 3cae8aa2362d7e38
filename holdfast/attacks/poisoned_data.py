"""Attackers that train in their own way on data that another attack poisons: a backdoor, say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator
from torch import Tensor

from holdfast.attacks.base import Attack, Trigger
from holdfast.attacks.moving_trigger import MovingTrigger
from holdfast.attacks.own_training import OwnTraining
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import build, setting
from holdfast.data.federation import Federation, Samples


class OnPoisonedData(OwnTraining):
    """The attack named by `poison` decides what its clients train on, and by which trigger it is measured;
    how they train is the subclass's own."""

    poison: Any = setting(
        "backdoor",
        "the attack on their data, by name or as a table such as { size = 3 }, which is about backdoor unless"
        " it names another",
    )

    @model_validator(mode="after")
    def _of_data(self) -> OnPoisonedData:
        given = self.poison
        for name in given if isinstance(given, Mapping) else ():
            if name in Attack.model_fields:
                raise ValueError(f"poison: '{name}' belongs beside poison, not into it; move it there")
        try:
            side = self.of_data
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if side.kinds or isinstance(side, OwnTraining):
            raise ValueError(
                f"poison: '{side.name}' changes what clients send; name an attack on data, such as backdoor"
            )
        return self

    @property
    def of_data(self) -> Attack:
        given = self.poison
        if isinstance(given, Mapping) and "name" not in given:
            given = {"name": "backdoor", **given}
        side: Attack = build("attack", given, "attack.poison")
        return side

    @property
    def target(self) -> int | None:
        """The class that poisoned samples are labelled as, where there is one."""
        return getattr(self.of_data, "target", None)

    def data(self, federation: Federation, malicious: Tensor, key: Key) -> Federation:
        return self.of_data.data(federation, malicious, key)

    def round_data(
        self, federation: Federation, malicious: Tensor, key: Key, round: int
    ) -> Federation | None:
        return self.of_data.round_data(federation, malicious, key, round)

    def planted(self, samples: Samples) -> Trigger | None:
        return self.of_data.planted(samples)

    def moving(self, samples: Samples) -> MovingTrigger | None:
        return self.of_data.moving(samples)
