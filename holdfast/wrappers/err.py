"""ERR: clients whose updates raise the error rate on the server's own data are left out (Fang et al., USENIX
Security 2020, section 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from holdfast.aggregators.base import Assessment
from holdfast.core.registry import register
from holdfast.wrappers.rejection import PAPER, Rejection


@register("wrapper", "err", paper=PAPER)
class ErrorRejection(Rejection):
    """Error-rate-based rejection: the rule without the f clients whose update raises the error rate of the
    rule's model most, as measured by leaving each out in turn on the server's own data (data.root).

    An error rate of few samples has few values, so many impacts are equal: the lowest ids stay. `lfr`
    measures the loss, and has both as `union = true`. What it costs and needs is the same."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what the rule sees": (
            "the updates without the f that raise the error rate on the server's own data (`data.root`) most"
        ),
        "what comes out": "the rule's aggregate of those that are left",
        "from": "Fang et al., USENIX Security 2020",
    }

    def impacts(self, found: Assessment) -> Sequence[Tensor]:
        return [found.error[0] - found.error[1:]]
