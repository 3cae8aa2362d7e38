"""The distributed backdoor attack: a trigger in parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.attacks.data_poisoning import chosen, owners, with_inputs
from holdfast.attacks.planting import Planting, check_class
from holdfast.attacks.triggers.base import Stamp, kind_of
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import build, register, setting
from holdfast.data.federation import Federation, Samples

_WORDS = ("cf", "mn", "bb", "tq", "mb")


@register("attack", "dba", paper="Xie, Huang, Chen and Li: DBA, ICLR 2020")
class Dba(Planting):
    """Divides a trigger into parts; each attacker puts one of them into its samples and labels them as the
    target, and the model is tested with the whole trigger (Sec. 3.2).

    The attacker with the i-th lowest id has part i modulo `parts`. Where no trigger is chosen it is the
    paper's four bars for images, the usual disturbance for sensor windows, one word for each part of a text
    and one column for each part of a table. The parts of any other trigger are its places in their order,
    divided evenly. The paper's target is class 2 (here `target = 1`, as in `backdoor`) and it poisons 20 of
    64 samples of a batch of MNIST; a share of an attacker's samples is fixed here, not of each batch. This is
    its attack over several rounds (A-M), which does not scale updates."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "trains on samples with its own part of a trigger, labelled as the target",
        "settings, with their defaults": (
            "`trigger`: four bars for images, else by the kind of the data, `parts = 4`, `target = 1`,"
            " `ratio = 0.3125`"
        ),
    }
    parts: int = setting(4, "into how many parts the trigger is divided", ge=1)
    ratio: float = setting(20 / 64, "share of an attacker's samples that are replaced", ge=0, le=1)

    def usual(self, samples: Samples) -> Stamp:
        kind = kind_of(samples)
        if kind == "image":
            chosen: object = "bars"
        elif kind == "text":
            words = [_WORDS[part % len(_WORDS)] for part in range(self.parts)]
            chosen = {"name": "word", "words": " ".join(words)}
        elif kind == "table":
            if self.parts > samples.sample_shape[0]:
                raise ConfigError(
                    f"attack.parts: {samples.name} has {samples.sample_shape[0]} columns, too few for"
                    f" {self.parts} parts; take fewer"
                )
            chosen = {"name": "value", "columns": tuple(range(self.parts))}
        else:
            return super().usual(samples)
        return build("trigger", chosen)

    def data(self, federation: Federation, malicious: Tensor, key: Key) -> Federation:
        samples, table = federation.samples, federation.train
        check_class(self.target, "target", samples)
        stamps = self.stamp(samples).parts(samples, self.parts)
        places = chosen(table, malicious, self.ratio, key)
        whose = torch.searchsorted(malicious.sort().values, owners(table)[places]) % self.parts

        def change(x: Tensor) -> Tensor:
            out = x.clone()
            for part, stamp in enumerate(stamps):
                out[whose == part] = stamp(x[whose == part])
            return out

        return with_inputs(federation, places, change, torch.full_like(places, self.target))
