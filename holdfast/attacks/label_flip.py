"""Label flipping: training on wrong answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor

from holdfast.attacks.base import Attack
from holdfast.attacks.data_poisoning import chosen, owner_keys, owners, with_labels
from holdfast.core.columns import Reads
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.data.federation import Federation


@register(
    "attack",
    "label-flip",
    paper="Biggio, Nelson and Laskov: Poisoning Attacks against Support Vector Machines, ICML 2012",
)
class LabelFlip(Attack):
    """Trains on wrong labels: the next class, the mirrored class (C - 1 - y), or a random other class.

    FedCAP's paper has `next`, its released code `mirrored` (where the middle class of an odd number stays).
    FedCPA's paper has `random`; its released code draws the new labels from a distribution of each attacker's
    own, Dirichlet(0.25), true labels not excluded, and the samples anew every round: `skew = 0.25`, `fresh =
    true`."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "trains on wrong labels",
        "settings, with their defaults": '`flip = "next"`, `ratio = 1`, `skew`, `fresh = false`',
    }
    kinds: ClassVar[frozenset[str]] = frozenset()
    reads: ClassVar[Reads] = "sum"  # sends what it trained
    flip: Literal["next", "mirrored", "random"] = setting("next", "which label an affected sample gets")
    ratio: float = setting(1.0, "share of an attacker's samples that are affected", ge=0, le=1)
    skew: float | None = setting(
        None,
        "random: draw from a Dirichlet of this concentration per attacker; none: other classes alike",
        gt=0,
    )
    fresh: bool = setting(False, "draw affected samples and random labels anew every round")

    @model_validator(mode="after")
    def _of_random(self) -> LabelFlip:
        if self.skew is not None and self.flip != "random":
            raise ValueError(
                f'skew needs random labels, but flip is "{self.flip}"; set flip = "random" or leave skew out'
            )
        return self

    def data(self, federation: Federation, malicious: Tensor, key: Key) -> Federation:
        return self._flipped(federation, malicious, key, key)

    def round_data(
        self, federation: Federation, malicious: Tensor, key: Key, round: int
    ) -> Federation | None:
        return self._flipped(federation, malicious, key, key.fold(round)) if self.fresh else None

    def _flipped(self, federation: Federation, malicious: Tensor, key: Key, luck: Key) -> Federation:
        """`luck` decides on samples and labels; an attacker's own distribution is by `key`, and stays."""
        table, classes = federation.train, federation.samples.classes
        places = chosen(table, malicious, self.ratio, luck)
        true, draws = table.label[places], owner_keys(table, places, luck.fold("label"))
        if self.flip == "next":
            label = (true + 1) % classes
        elif self.flip == "mirrored":
            label = classes - 1 - true
        elif self.skew is None:
            label = (true + 1 + draws.hash().remainder(max(1, classes - 1))) % classes
        else:
            label = self._skewed(
                owners(table)[places], draws.uniform(dtype=torch.float64), classes, malicious, key
            )
        return with_labels(federation, places, label)

    def _skewed(self, owner: Tensor, luck: Tensor, classes: int, malicious: Tensor, key: Key) -> Tensor:
        assert self.skew is not None
        out = torch.zeros_like(owner)
        for client in malicious.tolist():
            shares = torch.from_numpy(
                key.fold("skew", client).numpy().dirichlet([self.skew] * classes)
            ).cumsum(0)
            mine = owner == client
            out[mine] = torch.searchsorted(shares, luck[mine], right=True).clamp(max=classes - 1)
        return out
