"""LFR: clients whose updates raise the loss on the server's own data are left out (Fang et al., USENIX
Security 2020, section 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from holdfast.aggregators.base import Assessment
from holdfast.core.registry import register, setting
from holdfast.wrappers.rejection import PAPER, Rejection


@register("wrapper", "lfr", paper=PAPER)
class LossRejection(Rejection):
    """Loss-function-based rejection: the rule without the f clients whose update raises the loss of the
    rule's model most, as measured by leaving each out in turn on the server's own data (data.root).

    With `union = true` also without the f clients whose update raises the error rate most, which the paper
    calls Union. The loss is the mean cross-entropy; of equal impacts the lowest ids stay. The server trains
    on its data like a client, so that it has what does not travel (a head, say). Where its test fails, or
    nobody is left, the median is the fallback. Costs n + 1 aggregations, as many tests, and up to three more
    copies of the updates: with rules that cost n d a round costs n^2 d. Buffers (BatchNorm's statistics) of
    the models that are tested are averaged by the rule's weights."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what the rule sees": (
            "the updates without the f that raise the loss on the server's own data (`data.root`) most;"
            " `union = true`: or the error rate"
        ),
        "what comes out": "the rule's aggregate of those that are left",
        "from": "Fang et al., USENIX Security 2020",
    }
    union: bool = setting(False, "leave out also the f clients that raise the error rate most")

    def impacts(self, found: Assessment) -> Sequence[Tensor]:
        loss, error = (of[0] - of[1:] for of in found)
        return [loss, error] if self.union else [loss]
